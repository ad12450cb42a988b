"""What kernels that Inductor writes in C++ need, without torch's headers.

Inductor's header for kernels takes more than a second to read, ten times as long as most kernels take to compile. Here
is what float32, integer and boolean kernels use of it, on the compiler's own vector types: the same names, the same
order of operations, the same functions of libm and SLEEF, so that results are equal bit by bit. A source with a name
that is not known here is compiled with torch's header.
"""

from __future__ import annotations

import re

from sidefx_train import _torch_compat as compat

_STEPS = """
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
"""
"""Lines of each kernel around its loops. They tell of divisions of integers by zero, which no function here does."""

_PLAIN = re.compile("|".join(rf"^[ \t]*{re.escape(line.strip())}\n" for line in _STEPS.split("\n") if line), re.M)
_QUALIFIED = re.compile(r"\b(\w+(?:::\w+)+)")
_METHOD = re.compile(r"(?:\.(?:template\s+)?)([a-z_]\w*)\s*(?:<[^<>()]*>)?\(")
_ELEMENT = re.compile(r"\b(?:Vectorized|VectorizedN|VecMask|cast|to|loadu|convert|CascadeSumHelper|array)<\s*([\w:]+)")
_CALL = re.compile(r"(?<![\w.:>])([A-Za-z_]\w*)\s*(?:<[^<>()]*(?:\([^()]*\)[^<>()]*)*>)?\(")

_NAMES = {
    *(f"at::vec::{name}" for name in ("Vectorized", "VectorizedN", "VecMask", "maximum", "minimum", "clamp_min")),
    *(f"at::vec::{name}" for name in ("clamp_max", "convert", "vec_reduce_all")),
    *(f"std::{name}" for name in ("sqrt", "exp", "log", "tanh", "erf", "abs", "max", "min", "floor", "ceil", "trunc")),
    *(f"std::{name}" for name in ("log1p", "expm1", "sin", "cos", "pow", "isnan", "isinf", "nearbyint")),
    *(f"std::{name}" for name in ("numeric_limits", "array", "size_t")),
    "c10::convert",
    "c10::div_floor_integer",
    "Vectorized::loadu",
}
_METHODS = {
    *("loadu", "store", "blendv", "cast", "to", "all_zero", "all_masked", "is_masked", "data", "abs", "exp", "log"),
    *("sqrt", "rsqrt", "reciprocal", "neg", "tanh", "erf", "floor", "ceil", "trunc", "round", "sin", "cos", "log1p"),
    *("pow",),
}
_CALLS = {
    *("for", "if", "while", "return", "switch", "sizeof", "alignof", "alignas", "decltype", "static_cast", "void"),
    *("C10_LIKELY", "C10_UNLIKELY", "omp_get_thread_num", "float", "int64_t", "int32_t", "bool", "double", "int"),
    *("cascade_sum_combine", "cascade_sum_final", "sum_masked_reduce", "max_masked_reduce", "min_masked_reduce"),
    *("prod_masked_reduce", "any_masked_reduce", "max_propagate_nan", "min_propagate_nan", "transpose_mxn"),
    *("cast", "loadu", "to", "atomic_add", "atomic_add_vec", "num_threads", "collapse", "schedule", "reduction"),
}
_OWN = re.compile(r"(?:cpp_fused_|tmp|scalar_cascade_helper|masked_cascade_helper|cascade_helper)\w*")
_ELEMENTS = {"float", "int64_t", "int32_t", "at::vec::Vectorized", "bool"}
_REFUSED = re.compile(r"\b(?:BFloat16|Half|half|Welford|IndexValue|double|uint8_t|int8_t|int16_t|assert|goto|asm)\b")

_SIZES = {"CPU_CAPABILITY_AVX512": 64, "CPU_CAPABILITY_AVX2": 32}


def lean_kernels(kernels: str, capability: str) -> str | None:
    """The kernels behind the header of this module; ``None`` if only torch's header will do.

    Args:
        kernels: as Inductor writes them, each behind an include of its header.
        capability: the macro that tells Inductor's header which vectors there are.
    """
    size = _SIZES.get(capability)
    text = re.sub(rf"(?m)^[ \t]*#include <{re.escape(compat.KERNEL_HEADER)}>\n", "", kernels)
    if size is None or "#include" in text or not _is_known(text := _PLAIN.sub("", text)):
        return None
    return HEADER.replace("@BYTES@", str(size)) + re.sub(r"\bstd::", "lean::", text)


def _is_known(text: str) -> bool:
    code = re.sub(r"//[^\n]*", "", text)
    if _REFUSED.search(code):
        return False
    if not all(name in _NAMES for name in _QUALIFIED.findall(re.sub(r">::\w+", "", code))):
        return False
    if not all(name in _METHODS for name in _METHOD.findall(code)):
        return False
    if not all(name in _ELEMENTS for name in _ELEMENT.findall(code)):
        return False
    plain = re.sub(r"(?:at::vec|std|c10)::\w+", "", code)
    return all(name in _CALLS or _OWN.fullmatch(name) for name in _CALL.findall(plain))


HEADER = r"""
#include <stdint.h>

#define C10_LIKELY(x) (__builtin_expect(static_cast<bool>(x), 1))
#define C10_UNLIKELY(x) (__builtin_expect(static_cast<bool>(x), 0))
#define SIDEFX_BYTES @BYTES@
#define __at_align__ __attribute__((aligned(SIDEFX_BYTES)))
#define SIDEFX_EACH _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)
#define SIDEFX_INLINE inline __attribute__((always_inline))

extern "C" int omp_get_thread_num();

#if SIDEFX_BYTES == 64
#define SIDEFX_SLEEF(name, digits) Sleef_##name##f16_##digits
#else
#define SIDEFX_SLEEF(name, digits) Sleef_##name##f8_##digits
#endif

typedef float SidefxFloats __attribute__((vector_size(SIDEFX_BYTES)));
extern "C" {
SidefxFloats SIDEFX_SLEEF(exp, u10)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(log, u10)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(log1p, u10)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(tanh, u10)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(sin, u35)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(cos, u35)(SidefxFloats);
SidefxFloats SIDEFX_SLEEF(pow, u10)(SidefxFloats, SidefxFloats);
}

namespace {  // nothing here is torch's of the same name

namespace lean {  // in place of std

using size_t = decltype(sizeof(0));
template <class T> constexpr T max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> constexpr T min(const T& a, const T& b) { return b < a ? b : a; }

#define SIDEFX_FUNCTION(name) \
    inline float name(float x) { return __builtin_##name##f(x); } \
    inline double name(double x) { return __builtin_##name(x); }
SIDEFX_FUNCTION(sqrt) SIDEFX_FUNCTION(exp) SIDEFX_FUNCTION(log) SIDEFX_FUNCTION(tanh) SIDEFX_FUNCTION(erf)
SIDEFX_FUNCTION(floor) SIDEFX_FUNCTION(ceil) SIDEFX_FUNCTION(trunc) SIDEFX_FUNCTION(log1p) SIDEFX_FUNCTION(expm1)
SIDEFX_FUNCTION(sin) SIDEFX_FUNCTION(cos) SIDEFX_FUNCTION(nearbyint)
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline int64_t abs(int64_t x) { return x < 0 ? -x : x; }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline double pow(double x, double y) { return __builtin_pow(x, y); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(double x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
    static constexpr float infinity() { return __builtin_inff(); }
    static constexpr float quiet_NaN() { return __builtin_nanf(""); }
    static constexpr float max() { return __FLT_MAX__; }
    static constexpr float lowest() { return -__FLT_MAX__; }
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

template <class T, size_t N> struct array {
    T items[N];
    T* data() { return items; }
    T& operator[](size_t i) { return items[i]; }
    const T& operator[](size_t i) const { return items[i]; }
};

}  // namespace lean

namespace c10 {

template <class To, class From> constexpr To convert(From value) { return static_cast<To>(value); }

template <class T> inline T div_floor_integer(T a, T b) {
    const T quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

}  // namespace c10

namespace at::vec {

template <class T> struct Kind;  // its vector, one anywhere in memory, and the integers of its size
#if SIDEFX_BYTES == 64
#define SIDEFX_EIGHT 0, 1, 2, 3, 4, 5, 6, 7
#define SIDEFX_NEXT 8, 9, 10, 11, 12, 13, 14, 15
#else
#define SIDEFX_EIGHT 0, 1, 2, 3
#define SIDEFX_NEXT 4, 5, 6, 7
#endif
#define SIDEFX_SIXTEEN SIDEFX_EIGHT, SIDEFX_NEXT
#define SIDEFX_KIND(T, I, lanes) \
    template <> struct Kind<T> { \
        typedef T Register __attribute__((vector_size(SIDEFX_BYTES))); \
        typedef T Loose __attribute__((vector_size(SIDEFX_BYTES), aligned(sizeof(T)), may_alias)); \
        typedef I Integer; \
        typedef I Bits __attribute__((vector_size(SIDEFX_BYTES))); \
        static constexpr int size = SIDEFX_BYTES / sizeof(T); \
        static constexpr Bits places() { return Bits{lanes}; } \
    };
SIDEFX_KIND(float, int32_t, SIDEFX_SIXTEEN)
SIDEFX_KIND(int32_t, int32_t, SIDEFX_SIXTEEN)
SIDEFX_KIND(int64_t, int64_t, SIDEFX_EIGHT)

template <class T> using Register = typename Kind<T>::Register;
template <class T> using Bits = typename Kind<T>::Bits;

// All lanes up to a place, from which on there are zeros.
template <class T> SIDEFX_INLINE Bits<T> first_lanes(int64_t count) {
    return Kind<T>::places() < static_cast<typename Kind<T>::Integer>(count);
}

// Lanes chosen by a mask of ones and zeros; the others are zero and not read, or not written.
#if SIDEFX_BYTES == 64
SIDEFX_INLINE Register<float> load_some(const float* from, Bits<float> some) {
    return __builtin_ia32_loadups512_mask(from, Register<float>{}, __builtin_ia32_cvtd2mask512(some));
}
SIDEFX_INLINE Register<int32_t> load_some(const int32_t* from, Bits<int32_t> some) {
    return __builtin_ia32_loaddqusi512_mask(from, Register<int32_t>{}, __builtin_ia32_cvtd2mask512(some));
}
SIDEFX_INLINE Register<int64_t> load_some(const int64_t* from, Bits<int64_t> some) {
    typedef long long Wide __attribute__((vector_size(64)));
    return (Register<int64_t>)__builtin_ia32_loaddqudi512_mask(
        (const long long*)from, Wide{}, __builtin_ia32_cvtq2mask512((Wide)some));
}
SIDEFX_INLINE void store_some(float* to, Register<float> value, Bits<float> some) {
    __builtin_ia32_storeups512_mask(to, value, __builtin_ia32_cvtd2mask512(some));
}
SIDEFX_INLINE void store_some(int32_t* to, Register<int32_t> value, Bits<int32_t> some) {
    __builtin_ia32_storedqusi512_mask(to, value, __builtin_ia32_cvtd2mask512(some));
}
SIDEFX_INLINE void store_some(int64_t* to, Register<int64_t> value, Bits<int64_t> some) {
    typedef long long Wide __attribute__((vector_size(64)));
    __builtin_ia32_storedqudi512_mask((long long*)to, (Wide)value, __builtin_ia32_cvtq2mask512((Wide)some));
}
SIDEFX_INLINE Register<float> square_root(Register<float> x) {
    return __builtin_ia32_sqrtps512_mask(x, Register<float>{}, -1, 4);
}
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_rndscaleps_mask(x, way, Register<float>{}, -1, 4);
}
#else
SIDEFX_INLINE Register<float> load_some(const float* from, Bits<float> some) {
    return __builtin_ia32_maskloadps256((const Register<float>*)from, some);
}
SIDEFX_INLINE Register<int32_t> load_some(const int32_t* from, Bits<int32_t> some) {
    return __builtin_ia32_maskloadd256((const Register<int32_t>*)from, some);
}
SIDEFX_INLINE Register<int64_t> load_some(const int64_t* from, Bits<int64_t> some) {
    typedef long long Wide __attribute__((vector_size(32)));
    return (Register<int64_t>)__builtin_ia32_maskloadq256((const Wide*)from, (Wide)some);
}
SIDEFX_INLINE void store_some(float* to, Register<float> value, Bits<float> some) {
    __builtin_ia32_maskstoreps256((Register<float>*)to, some, value);
}
SIDEFX_INLINE void store_some(int32_t* to, Register<int32_t> value, Bits<int32_t> some) {
    __builtin_ia32_maskstored256((Register<int32_t>*)to, some, value);
}
SIDEFX_INLINE void store_some(int64_t* to, Register<int64_t> value, Bits<int64_t> some) {
    typedef long long Wide __attribute__((vector_size(32)));
    __builtin_ia32_maskstoreq256((Wide*)to, (Wide)some, (Wide)value);
}
SIDEFX_INLINE Register<float> square_root(Register<float> x) { return __builtin_ia32_sqrtps256(x); }
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_roundps256(x, way);
}
#endif

// Half of a register, and two halves as one; compilers before GCC 12 go through memory.
template <class T> struct Halves {
    typedef T Half __attribute__((vector_size(SIDEFX_BYTES / 2)));
#if __has_builtin(__builtin_shufflevector)
    static SIDEFX_INLINE Half low(Register<T> x) { return __builtin_shufflevector(x, x, SIDEFX_EIGHT); }
    static SIDEFX_INLINE Half high(Register<T> x) { return __builtin_shufflevector(x, x, SIDEFX_NEXT); }
    static SIDEFX_INLINE Register<T> both(Half low, Half high) {
        return __builtin_shufflevector(low, high, SIDEFX_SIXTEEN);
    }
#else
    static SIDEFX_INLINE Half low(Register<T> x) {
        Half half;
        __builtin_memcpy(&half, &x, sizeof half);
        return half;
    }
    static SIDEFX_INLINE Half high(Register<T> x) {
        Half half;
        __builtin_memcpy(&half, (const char*)&x + sizeof half, sizeof half);
        return half;
    }
    static SIDEFX_INLINE Register<T> both(Half low, Half high) {
        Register<T> x;
        __builtin_memcpy(&x, &low, sizeof low);
        __builtin_memcpy((char*)&x + sizeof low, &high, sizeof high);
        return x;
    }
#endif
};

// Half or double the number of lanes in each register: ``to`` has as many lanes in all as ``from``, or the first ones.
template <class To, int N, class From, int M> SIDEFX_INLINE void spread(
    Register<To> (&to)[N], const Register<From> (&from)[M]) {
    constexpr int wide = Kind<To>::size, other = Kind<From>::size;
    if constexpr (wide == other) {
        SIDEFX_EACH
            to[i] = i < M ? __builtin_convertvector(from[i < M ? i : 0], Register<To>) : Register<To>{};
    } else if constexpr (wide < other) {
        typedef Halves<From> Part;
        SIDEFX_EACH {
            if (i / 2 < M) {
                const Register<From> whole = from[i / 2 < M ? i / 2 : 0];
                to[i] = __builtin_convertvector(i % 2 == 0 ? Part::low(whole) : Part::high(whole), Register<To>);
            } else {
                to[i] = Register<To>{};
            }
        }
    } else {
        typedef typename Halves<To>::Half Half;
        SIDEFX_EACH {
            Half low = 2 * i < M ? __builtin_convertvector(from[2 * i < M ? 2 * i : 0], Half) : Half{};
            Half high = 2 * i + 1 < M ? __builtin_convertvector(from[2 * i + 1 < M ? 2 * i + 1 : 0], Half) : Half{};
            to[i] = Halves<To>::both(low, high);
        }
    }
}

template <class T, int N> struct VecMask;

template <class T, int N> struct VectorizedN {
    Register<T> v[N];

    VectorizedN() = default;
    SIDEFX_INLINE VectorizedN(T value) {
        SIDEFX_EACH v[i] = value - Register<T>{};
    }
    static constexpr int size() { return N * Kind<T>::size; }

    static SIDEFX_INLINE VectorizedN loadu(const void* from) {
        VectorizedN made;
        SIDEFX_EACH made.v[i] = ((const typename Kind<T>::Loose*)from)[i];
        return made;
    }
    static SIDEFX_INLINE VectorizedN loadu(const void* from, int64_t count) {
        if (count == size()) return loadu(from);
        VectorizedN made;
        SIDEFX_EACH {
            const T* here = (const T*)from + i * Kind<T>::size;
            made.v[i] = load_some(here, first_lanes<T>(count - i * Kind<T>::size));
        }
        return made;
    }
    SIDEFX_INLINE void store(void* to) const {
        SIDEFX_EACH ((typename Kind<T>::Loose*)to)[i] = v[i];
    }
    SIDEFX_INLINE void store(void* to, int64_t count) const {
        if (count == size()) return store(to);
        SIDEFX_EACH
            store_some((T*)to + i * Kind<T>::size, v[i], first_lanes<T>(count - i * Kind<T>::size));
    }
    static SIDEFX_INLINE VectorizedN arange(T first, int64_t step) {
        VectorizedN made;
        SIDEFX_EACH
            made.v[i] = first + (T)step * (__builtin_convertvector(Kind<T>::places() + i * size() / N, Register<T>));
        return made;
    }
    static SIDEFX_INLINE VectorizedN blendv(const VectorizedN& no, const VectorizedN& yes, const VecMask<T, N>& mask) {
        VectorizedN made;
        SIDEFX_EACH made.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
        return made;
    }
    static SIDEFX_INLINE VectorizedN set(const VectorizedN& behind, const VectorizedN& first, int64_t count) {
        VectorizedN made;
        SIDEFX_EACH
            made.v[i] = first_lanes<T>(count - i * Kind<T>::size) ? first.v[i] : behind.v[i];
        return made;
    }

#define SIDEFX_METHOD(name, expression) \
    SIDEFX_INLINE VectorizedN name() const { \
        VectorizedN made; \
        SIDEFX_EACH { const Register<T> x = v[i]; made.v[i] = expression; } \
        return made; \
    }
    SIDEFX_METHOD(neg, -x)
    SIDEFX_METHOD(sqrt, square_root(x))
    SIDEFX_METHOD(rsqrt, 1.0f / square_root(x))
    SIDEFX_METHOD(reciprocal, 1.0f / x)
    SIDEFX_METHOD(exp, SIDEFX_SLEEF(exp, u10)(x))
    SIDEFX_METHOD(log, SIDEFX_SLEEF(log, u10)(x))
    SIDEFX_METHOD(log1p, SIDEFX_SLEEF(log1p, u10)(x))
    SIDEFX_METHOD(tanh, SIDEFX_SLEEF(tanh, u10)(x))
    SIDEFX_METHOD(sin, SIDEFX_SLEEF(sin, u35)(x))
    SIDEFX_METHOD(cos, SIDEFX_SLEEF(cos, u35)(x))
    SIDEFX_METHOD(floor, rounded<9>(x))
    SIDEFX_METHOD(ceil, rounded<10>(x))
    SIDEFX_METHOD(trunc, rounded<11>(x))
    SIDEFX_METHOD(round, rounded<8>(x))
    SIDEFX_METHOD(erf, error_function(x))
    SIDEFX_INLINE VectorizedN abs() const {
        VectorizedN made;
        SIDEFX_EACH {
            if constexpr (sizeof(T) == sizeof(float) && T(0.5) != T(0)) {
                made.v[i] = (Register<T>)((Bits<T>)v[i] & 0x7fffffff);
            } else {
                made.v[i] = v[i] < 0 ? -v[i] : v[i];
            }
        }
        return made;
    }
    SIDEFX_INLINE VectorizedN pow(const VectorizedN& power) const {
        VectorizedN made;
        SIDEFX_EACH made.v[i] = SIDEFX_SLEEF(pow, u10)(v[i], power.v[i]);
        return made;
    }

    // Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    static __attribute__((noinline, optimize("fp-contract=fast"))) Register<T> error_function(Register<T> x) {
        const Bits<T> sign = (Bits<T>)x & INT32_MIN;
        const Register<T> t = 1.0f / (0.3275911f * (Register<T>)((Bits<T>)x ^ sign) + 1.0f);
        Register<T> r = 1.061405429f * t + -1.453152027f;
        r = r * t + 1.421413741f;
        r = r * t + -0.284496736f;
        r = r * t + 0.254829592f;
        const Register<T> square = x * x;
        const Register<T> power = -SIDEFX_SLEEF(exp, u10)(-square);
        const Register<T> scaled = power * t;
        return (Register<T>)((Bits<T>)(scaled * r + 1.0f) ^ sign);
    }
};

template <class T> using Vectorized = VectorizedN<T, 1>;

template <class T, int N> struct VecMask {
    Bits<T> v[N];

    static constexpr int size() { return N * Kind<T>::size; }

    static SIDEFX_INLINE VecMask from(bool value) {
        VecMask made;
        SIDEFX_EACH made.v[i] = Bits<T>{} - static_cast<typename Kind<T>::Integer>(value);
        return made;
    }
    static SIDEFX_INLINE VecMask from(int value) { return from(value != 0); }
    static SIDEFX_INLINE VecMask from(const bool* values, int64_t count) {
        VecMask made;
        SIDEFX_EACH
            for (int l = 0; l < Kind<T>::size; ++l) {
                const int place = i * Kind<T>::size + l;
                made.v[i][l] = place < count && values[place < count ? place : 0] ? -1 : 0;
            }
        return made;
    }
    template <class U, int M> static SIDEFX_INLINE VecMask from(const VectorizedN<U, M>& values) {
        VecMask<U, M> set;
        for (int i = 0; i < M; ++i) set.v[i] = values.v[i] != 0;
        return set.template cast<T, N>();
    }
    template <class U, int M> static SIDEFX_INLINE VecMask from(const VecMask<U, M>& mask) {
        return mask.template cast<T, N>();
    }

    template <class U, int M> SIDEFX_INLINE VecMask<U, M> cast() const {
        VecMask<U, M> made;
        spread<typename Kind<U>::Integer, M, typename Kind<T>::Integer, N>(made.v, v);
        return made;
    }
    template <class U, int M> SIDEFX_INLINE VectorizedN<U, M> to() const {  // 1 and 0
        const VecMask<U, M> mask = cast<U, M>();
        VectorizedN<U, M> made;
        for (int i = 0; i < M; ++i) made.v[i] = __builtin_convertvector(-mask.v[i], Register<U>);
        return made;
    }
    SIDEFX_INLINE bool all_zero() const {
        Bits<T> any = v[0];
        for (int i = 1; i < N; ++i) any |= v[i];
        return !some(any);
    }
    SIDEFX_INLINE bool all_masked() const {
        Bits<T> missing = ~v[0];
        for (int i = 1; i < N; ++i) missing |= ~v[i];
        return !some(missing);
    }
    SIDEFX_INLINE bool is_masked(int i) const { return v[i / Kind<T>::size][i % Kind<T>::size] != 0; }
    template <class U, int M> SIDEFX_INLINE VectorizedN<U, M> loadu(const U* from) const {
        const VecMask<U, M> mask = cast<U, M>();
        VectorizedN<U, M> made;
        for (int i = 0; i < M; ++i) made.v[i] = load_some(from + i * Kind<U>::size, mask.v[i]);
        return made;
    }
    SIDEFX_INLINE void store(bool* to, int64_t count = size()) const {
        SIDEFX_EACH
            for (int l = 0; l < Kind<T>::size; ++l)
                if (i * Kind<T>::size + l < count) to[i * Kind<T>::size + l] = v[i][l] != 0;
    }
    static SIDEFX_INLINE VecMask blendv(const VecMask& no, const VecMask& yes, const VecMask& mask) {
        VecMask made;
        SIDEFX_EACH made.v[i] = mask.v[i] ? yes.v[i] : no.v[i];
        return made;
    }
    static SIDEFX_INLINE VecMask set(const VecMask& behind, const VecMask& first, int64_t count) {
        VecMask made;
        SIDEFX_EACH
            made.v[i] = first_lanes<T>(count - i * Kind<T>::size) ? first.v[i] : behind.v[i];
        return made;
    }

private:
    static SIDEFX_INLINE bool some(Bits<T> bits) {
        typedef long long Wide __attribute__((vector_size(SIDEFX_BYTES)));
        const Wide wide = (Wide)bits;
        long long all = 0;
        for (int i = 0; i < SIDEFX_BYTES / 8; ++i) all |= wide[i];
        return all != 0;
    }
};

#define SIDEFX_BINARY(op) \
    template <class T, int N> SIDEFX_INLINE VectorizedN<T, N> operator op( \
        const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
        VectorizedN<T, N> made; \
        SIDEFX_EACH made.v[i] = a.v[i] op b.v[i]; \
        return made; \
    }
SIDEFX_BINARY(+) SIDEFX_BINARY(-) SIDEFX_BINARY(*) SIDEFX_BINARY(/)

#define SIDEFX_COMPARE(op) \
    template <class T, int N> SIDEFX_INLINE VecMask<T, N> operator op( \
        const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
        VecMask<T, N> made; \
        SIDEFX_EACH made.v[i] = a.v[i] op b.v[i]; \
        return made; \
    }
SIDEFX_COMPARE(==) SIDEFX_COMPARE(!=) SIDEFX_COMPARE(<) SIDEFX_COMPARE(<=) SIDEFX_COMPARE(>) SIDEFX_COMPARE(>=)

#define SIDEFX_LOGIC(op) \
    template <class T, int N, class U, int M> SIDEFX_INLINE VecMask<T, N> operator op( \
        const VecMask<T, N>& a, const VecMask<U, M>& b) { \
        static_assert(VecMask<T, N>::size() == VecMask<U, M>::size()); \
        const VecMask<T, N> other = b.template cast<T, N>(); \
        VecMask<T, N> made; \
        SIDEFX_EACH made.v[i] = a.v[i] op other.v[i]; \
        return made; \
    }
SIDEFX_LOGIC(&) SIDEFX_LOGIC(|) SIDEFX_LOGIC(^)
template <class T, int N> SIDEFX_INLINE VecMask<T, N> operator~(const VecMask<T, N>& a) {
    VecMask<T, N> made;
    SIDEFX_EACH made.v[i] = ~a.v[i];
    return made;
}

// All ones, which is not a number, where either is not one.
template <class T> SIDEFX_INLINE Register<T> without_order(Register<T> found, Register<T>, Register<T>) {
    return found;
}
template <> SIDEFX_INLINE Register<float> without_order<float>(
    Register<float> found, Register<float> a, Register<float> b) {
#if SIDEFX_BYTES == 64
    const auto none = __builtin_ia32_cvtmask2d512(__builtin_ia32_cmpps512_mask(a, b, 3, -1, 4));
#else
    const auto none = __builtin_ia32_cmpps256(a, b, 3);
#endif
    return (Register<float>)((Bits<float>)found | (Bits<float>)none);
}
#define SIDEFX_EXTREME(name, op) \
    template <class T, int N> SIDEFX_INLINE VectorizedN<T, N> name( \
        const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
        VectorizedN<T, N> made; \
        SIDEFX_EACH { \
            const Register<T> found = a.v[i] op b.v[i] ? a.v[i] : b.v[i]; \
            made.v[i] = without_order<T>(found, a.v[i], b.v[i]); \
        } \
        return made; \
    }
SIDEFX_EXTREME(maximum, >) SIDEFX_EXTREME(minimum, <)

template <class T, int N> SIDEFX_INLINE VectorizedN<T, N> clamp_min(
    const VectorizedN<T, N>& x, const VectorizedN<T, N>& least) {
    VectorizedN<T, N> made;
    SIDEFX_EACH made.v[i] = least.v[i] > x.v[i] ? least.v[i] : x.v[i];
    return made;
}
template <class T, int N> SIDEFX_INLINE VectorizedN<T, N> clamp_max(
    const VectorizedN<T, N>& x, const VectorizedN<T, N>& most) {
    VectorizedN<T, N> made;
    SIDEFX_EACH made.v[i] = most.v[i] < x.v[i] ? most.v[i] : x.v[i];
    return made;
}

template <class To, int N, class From, int M> SIDEFX_INLINE VectorizedN<To, N> convert(const VectorizedN<From, M>& x) {
    VectorizedN<To, N> made;
    spread<To, N, From, M>(made.v, x.v);
    return made;
}
template <class To, class From> SIDEFX_INLINE Vectorized<To> convert(const Vectorized<From>& x) {
    return convert<To, 1, From, 1>(x);
}

// Halves are combined until one lane is left.
template <class T, int N, class Op> SIDEFX_INLINE T vec_reduce_all(const Op& combine, VectorizedN<T, N> x) {
    Vectorized<T> all;
    all.v[0] = x.v[0];
    for (int i = 1; i < N; ++i) {
        Vectorized<T> next;
        next.v[0] = x.v[i];
        all = combine(all, next);
    }
#pragma GCC unroll 4
    for (int step = Kind<T>::size / 2; step > 0; step /= 2) {
        Vectorized<T> other;
        other.v[0] = __builtin_shuffle(all.v[0], Kind<T>::places() ^ step);
        all = combine(all, other);
    }
    return all.v[0][0];
}

}  // namespace at::vec

// Sums of many numbers: chunks are added up first, then sums of chunks in pairs, then sums of these.
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

inline void atomic_add(volatile float* place, float value) {
    volatile int32_t* bits = (volatile int32_t*)place;
    int32_t before = __atomic_load_n(bits, __ATOMIC_RELAXED), after;
    do {
        float sum;
        __builtin_memcpy(&sum, &before, sizeof sum);
        sum += value;
        __builtin_memcpy(&after, &sum, sizeof sum);
    } while (!__atomic_compare_exchange_n(bits, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}
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

// to[j * to_row + i] = from[i * from_row + j] for i < rows and j < columns, which fit in a square of lanes.
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
            const Bits<T> place = Kind<T>::places(), turned = place ^ step, behind = (place & step) != 0;
            const Bits<T> low = behind ? turned + side : place, high = behind ? place + side : turned;
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
