"""SIMD source in C++: vectors and masks as Inductor uses ``at::vec``, over registers (``simd_register_source.py``)."""

SOURCE = r"""
template <class T, int N> struct VecMask;

template <class T, int N> struct VectorizedN {
    Register<T> v[N];

    VectorizedN() = default;
    SIDEFX_INLINE VectorizedN(T value) {
        SIDEFX_EACH v[i] = Kind<T>::all(value);
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
            const int64_t left = count - i * Kind<T>::size;
            if constexpr (is_only_kept<T>) {
                made.v[i] = Register<T>{};
                __builtin_memcpy(&made.v[i], here, sizeof(T) * lanes_of<T>(left));
            } else {
                made.v[i] = load_some(here, first_lanes<T>(left));
            }
        }
        return made;
    }
    SIDEFX_INLINE void store(void* to) const {
        SIDEFX_EACH ((typename Kind<T>::Loose*)to)[i] = v[i];
    }
    SIDEFX_INLINE void store(void* to, int64_t count) const {
        if (count == size()) return store(to);
        SIDEFX_EACH {
            T* here = (T*)to + i * Kind<T>::size;
            const int64_t left = count - i * Kind<T>::size;
            if constexpr (is_only_kept<T>) {
                __builtin_memcpy(here, &v[i], sizeof(T) * lanes_of<T>(left));
            } else {
                store_some(here, v[i], first_lanes<T>(left));
            }
        }
    }
    static SIDEFX_INLINE VectorizedN arange(T first, int64_t step) {
        VectorizedN made;
        SIDEFX_EACH
            made.v[i] = first + (T)step * (__builtin_convertvector(Kind<T>::places() + i * size() / N, Register<T>));
        return made;
    }
    static SIDEFX_INLINE VectorizedN blendv(const VectorizedN& no, const VectorizedN& yes, const VecMask<T, N>& mask) {
        VectorizedN made;
        SIDEFX_EACH made.v[i] = choose(mask.v[i], yes.v[i], no.v[i]);
        return made;
    }
    static SIDEFX_INLINE VectorizedN set(const VectorizedN& behind, const VectorizedN& first, int64_t count) {
        VectorizedN made;
        SIDEFX_EACH
            made.v[i] = choose(first_lanes<T>(count - i * Kind<T>::size), first.v[i], behind.v[i]);
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
    SIDEFX_METHOD(rsqrt, T(1) / square_root(x))
    SIDEFX_METHOD(reciprocal, T(1) / x)
#define SIDEFX_METHOD_OF_SLEEF(name, narrow, wide) SIDEFX_METHOD(name, name##_of(x))
    SIDEFX_UNARY_OF_SLEEF(SIDEFX_METHOD_OF_SLEEF)
    SIDEFX_METHOD(floor, rounded<9>(x))
    SIDEFX_METHOD(ceil, rounded<10>(x))
    SIDEFX_METHOD(trunc, rounded<11>(x))
    SIDEFX_METHOD(round, rounded<8>(x))
    SIDEFX_METHOD(erf, erf_of(x))
    SIDEFX_INLINE VectorizedN abs() const {
        VectorizedN made;
        SIDEFX_EACH {
            if constexpr (T(0.5) != T(0)) {
                made.v[i] = (Register<T>)((Bits<T>)v[i] & lean::numeric_limits<typename Kind<T>::Integer>::max());
            } else {
                made.v[i] = v[i] < 0 ? -v[i] : v[i];
            }
        }
        return made;
    }
#define SIDEFX_METHOD_OF_TWO(name) \
    SIDEFX_INLINE VectorizedN name(const VectorizedN& other) const { \
        VectorizedN made; \
        SIDEFX_EACH made.v[i] = name##_of(v[i], other.v[i]); \
        return made; \
    }
    SIDEFX_METHOD_OF_TWO(pow) SIDEFX_METHOD_OF_TWO(atan2) SIDEFX_METHOD_OF_TWO(hypot) SIDEFX_METHOD_OF_TWO(fmod)
    SIDEFX_METHOD_OF_TWO(copysign)
};

template <class T> using Vectorized = VectorizedN<T, 1>;

template <class T, int N> struct VecMask {
    Chosen<T> v[N];

    static constexpr int size() { return N * Kind<T>::size; }

    static SIDEFX_INLINE VecMask from(bool value) {
        VecMask made;
        SIDEFX_EACH made.v[i] = every_lane<T>(value);
        return made;
    }
    static SIDEFX_INLINE VecMask from(int value) { return from(value != 0); }
    static SIDEFX_INLINE VecMask from(const bool* values, int64_t count) {
        VectorizedN<T, N> numbers;
        SIDEFX_EACH
            for (int l = 0; l < Kind<T>::size; ++l) {
                const int place = i * Kind<T>::size + l;
                numbers.v[i][l] = place < count && values[place < count ? place : 0] ? 1 : 0;
            }
        return from(numbers);
    }
    template <class U, int M> static SIDEFX_INLINE VecMask from(const VectorizedN<U, M>& values) {
        VecMask<U, M> set;
        for (int i = 0; i < M; ++i) set.v[i] = unequal(values.v[i], Register<U>{});
        return set.template cast<T, N>();
    }
    template <class U, int M> static SIDEFX_INLINE VecMask from(const VecMask<U, M>& mask) {
        return mask.template cast<T, N>();
    }

    template <class U, int M> SIDEFX_INLINE VecMask<U, M> cast() const {
        VecMask<U, M> made;
#if SIDEFX_BYTES == 64
        uint64_t all = 0;
        SIDEFX_EACH all |= uint64_t(v[i]) << i * Kind<T>::size;
        for (int i = 0; i < M; ++i) made.v[i] = Chosen<U>(all >> i * Kind<U>::size);
#else
        spread<typename Kind<U>::Integer, M, typename Kind<T>::Integer, N>(made.v, v);
#endif
        return made;
    }
    template <class U, int M> SIDEFX_INLINE VectorizedN<U, M> to() const {  // 1 and 0
        const VecMask<U, M> mask = cast<U, M>();
        VectorizedN<U, M> made;
        for (int i = 0; i < M; ++i) made.v[i] = choose(mask.v[i], Register<U>{} + U(1), Register<U>{});
        return made;
    }
    SIDEFX_INLINE bool all_zero() const {
        Chosen<T> any = v[0];
        for (int i = 1; i < N; ++i) any |= v[i];
        return none_chosen<T>(any);
    }
    SIDEFX_INLINE bool all_masked() const {
        Chosen<T> missing = ~v[0];
        for (int i = 1; i < N; ++i) missing |= ~v[i];
        return none_chosen<T>(missing);
    }
    SIDEFX_INLINE bool is_masked(int i) const { return is_chosen<T>(v[i / Kind<T>::size], i % Kind<T>::size); }
    template <class U, int M> SIDEFX_INLINE VectorizedN<U, M> loadu(const U* from) const {
        const VecMask<U, M> mask = cast<U, M>();
        VectorizedN<U, M> made;
        for (int i = 0; i < M; ++i) made.v[i] = load_some(from + i * Kind<U>::size, mask.v[i]);
        return made;
    }
    SIDEFX_INLINE void store(bool* to, int64_t count = size()) const {
        SIDEFX_EACH
            for (int l = 0; l < Kind<T>::size; ++l)
                if (i * Kind<T>::size + l < count) to[i * Kind<T>::size + l] = is_chosen<T>(v[i], l);
    }
    static SIDEFX_INLINE VecMask blendv(const VecMask& no, const VecMask& yes, const VecMask& mask) {
        VecMask made;
        SIDEFX_EACH made.v[i] = (yes.v[i] & mask.v[i]) | (no.v[i] & ~mask.v[i]);
        return made;
    }
    static SIDEFX_INLINE VecMask set(const VecMask& behind, const VecMask& first, int64_t count) {
        VecMask some;
        SIDEFX_EACH some.v[i] = first_lanes<T>(count - i * Kind<T>::size);
        return blendv(behind, first, some);
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

#define SIDEFX_COMPARE(op, name) \
    template <class T, int N> SIDEFX_INLINE VecMask<T, N> operator op( \
        const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
        VecMask<T, N> made; \
        SIDEFX_EACH made.v[i] = name(a.v[i], b.v[i]); \
        return made; \
    }
SIDEFX_COMPARE(==, equal) SIDEFX_COMPARE(!=, unequal) SIDEFX_COMPARE(<, below)
SIDEFX_COMPARE(<=, not_above) SIDEFX_COMPARE(>, above) SIDEFX_COMPARE(>=, not_below)

#define SIDEFX_LOGIC(op, expression) \
    template <class T, int N, class U, int M> SIDEFX_INLINE VecMask<T, N> operator op( \
        const VecMask<T, N>& left, const VecMask<U, M>& right) { \
        static_assert(VecMask<T, N>::size() == VecMask<U, M>::size()); \
        const VecMask<T, N> other = right.template cast<T, N>(); \
        VecMask<T, N> made; \
        SIDEFX_EACH { \
            const Chosen<T> a = left.v[i], b = other.v[i]; \
            made.v[i] = expression; \
        } \
        return made; \
    }
SIDEFX_LOGIC(&, a & b) SIDEFX_LOGIC(|, a | b) SIDEFX_LOGIC(^, a ^ b)
SIDEFX_LOGIC(==, ~(a ^ b)) SIDEFX_LOGIC(!=, a ^ b)
SIDEFX_LOGIC(<, ~a & b) SIDEFX_LOGIC(<=, ~a | b) SIDEFX_LOGIC(>, a & ~b) SIDEFX_LOGIC(>=, a | ~b)
template <class T, int N> SIDEFX_INLINE VecMask<T, N> operator~(const VecMask<T, N>& a) {
    VecMask<T, N> made;
    SIDEFX_EACH made.v[i] = ~a.v[i];
    return made;
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

template <class T, int N> SIDEFX_INLINE VectorizedN<T, N> fmadd(
    const VectorizedN<T, N>& a, const VectorizedN<T, N>& b, const VectorizedN<T, N>& c) {
    VectorizedN<T, N> made;
    SIDEFX_EACH made.v[i] = fused(a.v[i], b.v[i], c.v[i]);
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

// Combines halves until one lane is left.
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

// From torch 2.15 on, kernels cast masks by this function.
template <class T, int N, class U, int M> SIDEFX_INLINE at::vec::VecMask<T, N> inductor_vec_mask_cast(
    const at::vec::VecMask<U, M>& mask) {
    return mask.template cast<T, N>();
}
"""
