"""SIMD helpers in C++: functions of ``std`` and ``c10`` that kernels call, reductions, transposes."""

BEFORE = r"""
#include <stdint.h>

#define C10_LIKELY(x) (__builtin_expect(static_cast<bool>(x), 1))
#define C10_UNLIKELY(x) (__builtin_expect(static_cast<bool>(x), 0))
#define SIDEFX_BYTES @BYTES@
#define __at_align__ __attribute__((aligned(SIDEFX_BYTES)))
#define SIDEFX_EACH _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)
#define SIDEFX_INLINE inline __attribute__((always_inline))

extern "C" int omp_get_thread_num();

#if SIDEFX_BYTES == 64
#define SIDEFX_FLOATS(name) Sleef_##name##f16
#define SIDEFX_DOUBLES(name) Sleef_##name##d8
#else
#define SIDEFX_FLOATS(name) Sleef_##name##f8
#define SIDEFX_DOUBLES(name) Sleef_##name##d4
#endif
#define SIDEFX_JOIN(name, accuracy) name##_##accuracy
#define SIDEFX_JOINED(name, accuracy) SIDEFX_JOIN(name, accuracy)
#define SIDEFX_SLEEF(kind, name, accuracy) SIDEFX_JOINED(kind(name), accuracy)

// SLEEF's functions of one vector, with the accuracy that torch chooses for float32 and for float64. Without sinh, cosh
// and acosh, which torch 2.15 computes otherwise: SLEEF's overflow too early.
#define SIDEFX_UNARY_OF_SLEEF(each) \
    each(exp, u10, u10) each(exp2, u10, u10) each(expm1, u10, u10) each(log, u10, u10) each(log2, u10, u10) \
    each(log10, u10, u10) each(log1p, u10, u10) each(tanh, u10, u10) each(sin, u35, u10) each(cos, u35, u10) \
    each(tan, u10, u10) each(asin, u10, u10) each(acos, u10, u10) each(atan, u10, u10) each(atanh, u10, u10) \
    each(erfc, u15, u15)

typedef float SidefxFloats __attribute__((vector_size(SIDEFX_BYTES)));
typedef double SidefxDoubles __attribute__((vector_size(SIDEFX_BYTES)));
#define SIDEFX_DECLARE(name, narrow, wide) \
    SidefxFloats SIDEFX_SLEEF(SIDEFX_FLOATS, name, narrow)(SidefxFloats); \
    SidefxDoubles SIDEFX_SLEEF(SIDEFX_DOUBLES, name, wide)(SidefxDoubles);
extern "C" {
SIDEFX_UNARY_OF_SLEEF(SIDEFX_DECLARE)
SidefxDoubles SIDEFX_SLEEF(SIDEFX_DOUBLES, erf, u10)(SidefxDoubles);
SidefxFloats SIDEFX_SLEEF(SIDEFX_FLOATS, pow, u10)(SidefxFloats, SidefxFloats);
SidefxDoubles SIDEFX_SLEEF(SIDEFX_DOUBLES, pow, u10)(SidefxDoubles, SidefxDoubles);
SidefxFloats SIDEFX_SLEEF(SIDEFX_FLOATS, atan2, u10)(SidefxFloats, SidefxFloats);
SidefxDoubles SIDEFX_SLEEF(SIDEFX_DOUBLES, atan2, u10)(SidefxDoubles, SidefxDoubles);
SidefxFloats SIDEFX_SLEEF(SIDEFX_FLOATS, hypot, u05)(SidefxFloats, SidefxFloats);
SidefxDoubles SIDEFX_SLEEF(SIDEFX_DOUBLES, hypot, u05)(SidefxDoubles, SidefxDoubles);
SidefxFloats SIDEFX_FLOATS(fmod)(SidefxFloats, SidefxFloats);
SidefxDoubles SIDEFX_DOUBLES(fmod)(SidefxDoubles, SidefxDoubles);
SidefxFloats SIDEFX_FLOATS(copysign)(SidefxFloats, SidefxFloats);
SidefxDoubles SIDEFX_DOUBLES(copysign)(SidefxDoubles, SidefxDoubles);
}

// Stored and copied; computations use float32. Kernels take pointers to it, so it is in no unnamed namespace.
struct SidefxBFloat16 {
    uint16_t x;
    SidefxBFloat16() = default;
    SidefxBFloat16(float value) {
        uint32_t bits;
        __builtin_memcpy(&bits, &value, sizeof bits);
        x = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    operator float() const {
        const uint32_t bits = uint32_t(x) << 16;
        float value;
        __builtin_memcpy(&value, &bits, sizeof value);
        return value;
    }
};

namespace {  // nothing here has the linkage of torch's names

namespace at { using BFloat16 = SidefxBFloat16; }

namespace lean {  // replacements of std

using size_t = decltype(sizeof(0));
template <class T> constexpr T max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> constexpr T min(const T& a, const T& b) { return b < a ? b : a; }

#define SIDEFX_FUNCTION(name) \
    inline float name(float x) { return __builtin_##name##f(x); } \
    inline double name(double x) { return __builtin_##name(x); }
SIDEFX_FUNCTION(sqrt) SIDEFX_FUNCTION(exp) SIDEFX_FUNCTION(log) SIDEFX_FUNCTION(tanh) SIDEFX_FUNCTION(erf)
SIDEFX_FUNCTION(floor) SIDEFX_FUNCTION(ceil) SIDEFX_FUNCTION(trunc) SIDEFX_FUNCTION(log1p) SIDEFX_FUNCTION(expm1)
SIDEFX_FUNCTION(sin) SIDEFX_FUNCTION(cos) SIDEFX_FUNCTION(nearbyint) SIDEFX_FUNCTION(exp2) SIDEFX_FUNCTION(log2)
SIDEFX_FUNCTION(log10) SIDEFX_FUNCTION(tan) SIDEFX_FUNCTION(asin) SIDEFX_FUNCTION(acos) SIDEFX_FUNCTION(atan)
SIDEFX_FUNCTION(sinh) SIDEFX_FUNCTION(cosh) SIDEFX_FUNCTION(asinh) SIDEFX_FUNCTION(acosh) SIDEFX_FUNCTION(atanh)
SIDEFX_FUNCTION(erfc) SIDEFX_FUNCTION(lgamma)
#define SIDEFX_FUNCTION_OF_TWO(name) \
    inline float name(float x, float y) { return __builtin_##name##f(x, y); } \
    inline double name(double x, double y) { return __builtin_##name(x, y); }
SIDEFX_FUNCTION_OF_TWO(fmod) SIDEFX_FUNCTION_OF_TWO(copysign) SIDEFX_FUNCTION_OF_TWO(atan2)
SIDEFX_FUNCTION_OF_TWO(hypot)
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline int64_t abs(int64_t x) { return x < 0 ? -x : x; }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline double pow(double x, double y) { return __builtin_pow(x, y); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }
inline bool signbit(int64_t x) { return x < 0; }
inline bool signbit(int32_t x) { return x < 0; }

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float quiet_NaN() { return __builtin_nanf(""); }
    static constexpr float max() { return __FLT_MAX__; }
    static constexpr float lowest() { return -__FLT_MAX__; }
};
template <> struct numeric_limits<at::BFloat16> {
    static at::BFloat16 infinity() { return __builtin_inff(); }
    static at::BFloat16 quiet_NaN() { return __builtin_nanf(""); }
};
template <> struct numeric_limits<double> {
    static constexpr double infinity() { return __builtin_inf(); }
    static constexpr double quiet_NaN() { return __builtin_nan(""); }
    static constexpr double max() { return __DBL_MAX__; }
    static constexpr double lowest() { return -__DBL_MAX__; }
};
template <> struct numeric_limits<int64_t> {
    static constexpr int64_t max() { return INT64_MAX; }
    static constexpr int64_t min() { return INT64_MIN; }
    static constexpr int64_t lowest() { return INT64_MIN; }
};
template <> struct numeric_limits<int32_t> {
    static constexpr int32_t max() { return INT32_MAX; }
    static constexpr int32_t min() { return INT32_MIN; }
    static constexpr int32_t lowest() { return INT32_MIN; }
};

template <class T> struct Unsigned;
template <> struct Unsigned<int64_t> { using type = uint64_t; };
template <> struct Unsigned<int32_t> { using type = uint32_t; };
template <class T> using make_unsigned_t = typename Unsigned<T>::type;

template <class T, size_t N> struct array {
    T items[N];
    T* data() { return items; }
    T& operator[](size_t i) { return items[i]; }
    const T& operator[](size_t i) const { return items[i]; }
};

template <class T> struct unique_ptr;
template <class T> struct unique_ptr<T[]> {
    T* items;
    explicit unique_ptr(size_t count) : items((T*)__builtin_calloc(count, sizeof(T))) {}
    unique_ptr(const unique_ptr&) = delete;
    ~unique_ptr() { __builtin_free(items); }
    T* get() const { return items; }
};
template <class T> unique_ptr<T> make_unique(size_t count) { return unique_ptr<T>(count); }

}  // namespace lean

namespace c10 {

template <class To, class From> constexpr To convert(From value) { return static_cast<To>(value); }

}  // namespace c10
"""

AFTER = r"""
// Sums of many numbers: chunks are summed first, then sums of chunks in pairs, then those sums.
template <class T, uint64_t chunk> struct CascadeSumHelper {
    T sums[64];
    uint64_t depth = 0, chunks = 0, index = 0;
    explicit CascadeSumHelper(uint64_t count) {
        const uint64_t needed = (count + chunk - 1) / chunk;
        while ((uint64_t(1) << depth) < needed) ++depth;
        for (uint64_t i = 0; i < depth || i < 1; ++i) sums[i] = T(0);
    }
    inline T carried() {
        if (depth == 0 || ++index != chunk) return sums[0];
        index = 0;
        ++chunks;
        uint64_t level = 1;
        for (uint64_t bits = chunks; level < depth && bits % 2 == 0; ++level, bits /= 2) {
            sums[level] = sums[level] + sums[level - 1];
            sums[level - 1] = T(0);
        }
        return sums[level - 1];
    }
};
template <class T, uint64_t chunk> inline T cascade_sum_combine(T& next, CascadeSumHelper<T, chunk>* helper) {
    helper->sums[0] = helper->sums[0] + next;
    return helper->carried();
}
template <class T, uint64_t chunk> inline T cascade_sum_combine(
    T& next, int64_t count, CascadeSumHelper<T, chunk>* helper) {
    helper->sums[0] = T::set(helper->sums[0], helper->sums[0] + next, count);
    return helper->carried();
}
template <class T, uint64_t chunk> inline T cascade_sum_final(CascadeSumHelper<T, chunk>* helper) {
    T sum = helper->sums[0];
    for (uint64_t i = 1; i < helper->depth; ++i) sum = sum + helper->sums[i];
    return sum;
}

#define SIDEFX_MASKED(name, expression, logic) \
    template <class T, int N> SIDEFX_INLINE at::vec::VectorizedN<T, N> name( \
        const at::vec::VectorizedN<T, N>& a, const at::vec::VectorizedN<T, N>& b, int64_t count) { \
        return at::vec::VectorizedN<T, N>::set(a, expression, count); \
    } \
    template <class T, int N> SIDEFX_INLINE at::vec::VecMask<T, N> name( \
        const at::vec::VecMask<T, N>& a, const at::vec::VecMask<T, N>& b, int64_t count) { \
        return at::vec::VecMask<T, N>::set(a, a logic b, count); \
    }
SIDEFX_MASKED(sum_masked_reduce, a + b, |)
SIDEFX_MASKED(max_masked_reduce, at::vec::maximum(a, b), |)
SIDEFX_MASKED(min_masked_reduce, at::vec::minimum(a, b), &)
SIDEFX_MASKED(prod_masked_reduce, a * b, &)
template <class T, int N> SIDEFX_INLINE at::vec::VecMask<T, N> any_masked_reduce(
    const at::vec::VecMask<T, N>& a, const at::vec::VecMask<T, N>& b, int64_t count) {
    return at::vec::VecMask<T, N>::set(a, a | b, count);
}

template <class T> inline T max_propagate_nan(T a, T b) { return a != a ? a : a > b ? a : b; }
template <class T> inline T min_propagate_nan(T a, T b) { return a != a ? a : a < b ? a : b; }

// Integer divisions. One by zero is noted, and reported when the kernel is done: threads of a loop cannot throw.
int* inductor_cpu_integer_div_error_flag = nullptr;
inline void note_division_by_zero() {
    if (inductor_cpu_integer_div_error_flag) __atomic_store_n(inductor_cpu_integer_div_error_flag, 1, __ATOMIC_RELAXED);
}
inline void inductor_cpu_throw_if_integer_div_error(int noted) {
    if (noted) throw SidefxFailure{"ZeroDivisionError"};
}
template <class T, class U> inline auto mod(T a, U b) -> decltype(a % b) {
    if (b == 0) note_division_by_zero();
    return b == 0 || b == U(-1) ? 0 : a % b;  // the processor's division by -1 overflows
}
template <class T> inline T remainder_integral(T a, T b) {
    const T rest = mod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T, class U> inline auto floor_divide_integral(T a, U b) -> decltype(a % b) {
    if (b == 0) note_division_by_zero();
    return c10::div_floor_integer<decltype(a % b)>(a, b);
}
#define SIDEFX_OF_LANES(name) \
    template <class T, int N> inline at::vec::VectorizedN<T, N> name( \
        const at::vec::VectorizedN<T, N>& a, const at::vec::VectorizedN<T, N>& b) { \
        constexpr int count = at::vec::VectorizedN<T, N>::size(); \
        __at_align__ T left[count], right[count]; \
        a.store(left); \
        b.store(right); \
        for (int i = 0; i < count; ++i) left[i] = name(left[i], right[i]); \
        return at::vec::VectorizedN<T, N>::loadu(left); \
    }
SIDEFX_OF_LANES(remainder_integral) SIDEFX_OF_LANES(floor_divide_integral)

inline float mod(float a, float b) { return lean::fmod(a, b); }
inline double mod(double a, double b) { return lean::fmod(a, b); }

// The largest or smallest value so far and its place: the first of equals, and of NaN, which is beyond all numbers.
template <class T> struct IndexValue {
    int64_t index = 0;
    T value;
    IndexValue() = default;
    IndexValue(int64_t index, T value) : index(index), value(value) {}
};
template <class T, int NV, int NI> struct IndexValueVec {
    at::vec::VectorizedN<T, NV> value;
    at::vec::VectorizedN<int64_t, NI> index;
    IndexValueVec() = default;
    IndexValueVec(T same) : value(same), index(0) {}
};

#define SIDEFX_PLACE_OF(extreme, op, best) \
    template <class T> inline IndexValue<T>& extreme##_combine(IndexValue<T>& a, T value, int64_t index) { \
        const bool equal = a.value == value || (a.value != a.value && value != value); \
        const bool kept = equal ? a.index < index : a.value op value || a.value != a.value; \
        if (!kept) a = IndexValue<T>(index, value); \
        return a; \
    } \
    template <class T> inline IndexValue<T>& extreme##_combine(IndexValue<T>& a, const IndexValue<T>& next) { \
        return extreme##_combine(a, next.value, next.index); \
    } \
    template <class T, int NV, int NI> SIDEFX_INLINE IndexValueVec<T, NV, NI>& extreme##_combine_vec( \
        IndexValueVec<T, NV, NI>& a, at::vec::VectorizedN<T, NV> value, at::vec::VectorizedN<int64_t, NI> index, \
        int64_t count = at::vec::VectorizedN<T, NV>::size()) { \
        const auto none = a.value != a.value, other_none = value != value; \
        const auto equal = (a.value == value) | (none & other_none); \
        const auto better = (a.value op value) | (none & ~other_none); \
        const at::vec::VecMask<int64_t, NI> kept = better.template cast<int64_t, NI>() | \
            (equal.template cast<int64_t, NI>() & (a.index < index)); \
        a.value = at::vec::VectorizedN<T, NV>::set(a.value, at::vec::best(a.value, value), count); \
        a.index = at::vec::VectorizedN<int64_t, NI>::set( \
            a.index, at::vec::VectorizedN<int64_t, NI>::blendv(index, a.index, kept), count); \
        return a; \
    } \
    template <class T, int NV, int NI, bool along> SIDEFX_INLINE IndexValueVec<T, NV, NI>& extreme##_combine_vec( \
        IndexValueVec<T, NV, NI>& a, at::vec::VectorizedN<T, NV> value, int64_t index, \
        int64_t count = at::vec::VectorizedN<T, NV>::size()) { \
        using Places = at::vec::VectorizedN<int64_t, NI>; \
        return extreme##_combine_vec(a, value, along ? Places::arange(index, 1) : Places(index), count); \
    } \
    template <class T, int NV, int NI> SIDEFX_INLINE IndexValueVec<T, NV, NI>& extreme##_combine_vec( \
        IndexValueVec<T, NV, NI>& a, const IndexValueVec<T, NV, NI>& next, \
        int64_t count = at::vec::VectorizedN<T, NV>::size()) { \
        return extreme##_combine_vec(a, next.value, next.index, count); \
    } \
    template <class T, int NV, int NI> inline IndexValue<T> extreme##_vec_reduce_all( \
        const IndexValueVec<T, NV, NI>& all) { \
        __at_align__ T values[at::vec::VectorizedN<T, NV>::size()]; \
        __at_align__ int64_t places[at::vec::VectorizedN<int64_t, NI>::size()]; \
        all.value.store(values); \
        all.index.store(places); \
        IndexValue<T> found(places[0], values[0]); \
        for (int i = 1; i < at::vec::VectorizedN<T, NV>::size(); ++i) \
            extreme##_combine(found, values[i], places[i]); \
        return found; \
    }
SIDEFX_PLACE_OF(argmax, >, maximum) SIDEFX_PLACE_OF(argmin, <, minimum)

template <class Bits, class T> inline void add_by_exchange(volatile T* place, T value) {
    volatile Bits* bits = (volatile Bits*)place;
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    do {
        T sum;
        __builtin_memcpy(&sum, &before, sizeof sum);
        sum += value;
        __builtin_memcpy(&after, &sum, sizeof sum);
    } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}
inline void atomic_add(volatile float* place, float value) { add_by_exchange<int32_t>(place, value); }
inline void atomic_add(volatile double* place, double value) { add_by_exchange<int64_t>(place, value); }
inline void atomic_add(volatile int64_t* place, int64_t value) { __atomic_fetch_add(place, value, __ATOMIC_RELAXED); }
inline void atomic_add(volatile int32_t* place, int32_t value) { __atomic_fetch_add(place, value, __ATOMIC_RELAXED); }

template <class T, int NI, int NV> inline void atomic_add_vec(
    T* to, const at::vec::VectorizedN<int64_t, NI>& places, const at::vec::VectorizedN<T, NV>& values,
    int64_t count = at::vec::VectorizedN<int64_t, NI>::size()) {
    __at_align__ int64_t place[at::vec::VectorizedN<int64_t, NI>::size()];
    __at_align__ T value[at::vec::VectorizedN<T, NV>::size()];
    places.store(place);
    values.store(value);
    for (int64_t i = 0; i < count; ++i) atomic_add(to + place[i], value[i]);
}

// to[j * to_row + i] = from[i * from_row + j] for i < rows and j < columns, which fit in a block of lanes.
template <class T, int64_t rows, int64_t columns, bool atomic> inline void transpose_mxn(
    const T* from, int64_t from_row, T* to, int64_t to_row) {
    using namespace at::vec;
    constexpr int side = Kind<T>::size;
    if constexpr (atomic) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) atomic_add(to + j * to_row + i, from[i * from_row + j]);
    } else if constexpr (rows > side || columns > side) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
    } else {
        Register<T> square[side];
#pragma GCC unroll 16
        for (int i = 0; i < side; ++i)
            square[i] = i < rows ? Vectorized<T>::loadu(from + i * from_row, columns).v[0] : Register<T>{};
#pragma GCC unroll 4
        for (int step = side / 2; step > 0; step /= 2) {
            const Bits<T> place = Kind<T>::places(), partner = place ^ step, behind = (place & step) != 0;
            const Bits<T> low = behind ? partner + side : place, high = behind ? place + side : partner;
#pragma GCC unroll 16
            for (int i = 0; i < side; ++i) {
                if (i & step) continue;
                const Register<T> a = square[i], b = square[i ^ step];
                square[i] = __builtin_shuffle(a, b, low);
                square[i ^ step] = __builtin_shuffle(a, b, high);
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < side; ++j) {
            if (j >= columns) continue;
            Vectorized<T> row;
            row.v[0] = square[j];
            row.store(to + j * to_row, rows);
        }
    }
}

}  // namespace
"""
