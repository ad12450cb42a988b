"""SIMD source in C++: vectors and masks as Inductor uses ``at::vec``, on the compiler's own vector types.

A mask has one bit per lane if the CPU has mask registers (AVX-512), and is a vector of ones and zeros otherwise; only
the functions on ``Chosen`` lanes differ.
"""

SOURCE = r"""
namespace at::vec {

template <class T> struct Kind;  // its vector type, the unaligned one, and integers of the same size
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
        static SIDEFX_INLINE Register all(T value) { return value - Register{}; } \
    };
SIDEFX_KIND(float, int32_t, SIDEFX_SIXTEEN)
SIDEFX_KIND(int32_t, int32_t, SIDEFX_SIXTEEN)
SIDEFX_KIND(int64_t, int64_t, SIDEFX_EIGHT)
template <> struct Kind<int8_t> {
    typedef int8_t Register __attribute__((vector_size(SIDEFX_BYTES)));
    typedef int8_t Loose __attribute__((vector_size(SIDEFX_BYTES), aligned(1), may_alias));
    static constexpr int size = SIDEFX_BYTES;
};
template <> struct Kind<BFloat16> {
    typedef uint16_t Register __attribute__((vector_size(SIDEFX_BYTES)));
    typedef uint16_t Loose __attribute__((vector_size(SIDEFX_BYTES), aligned(sizeof(uint16_t)), may_alias));
    static constexpr int size = SIDEFX_BYTES / sizeof(uint16_t);
    static SIDEFX_INLINE Register all(BFloat16 value) { return value.x - Register{}; }
};
template <class T> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<BFloat16> = true;
template <class T> constexpr bool is_only_kept = sizeof(T) < sizeof(int32_t);  // storage only, no arithmetic

template <class T> constexpr int lanes_of(int64_t count) {
    return count < 0 ? 0 : count < Kind<T>::size ? int(count) : Kind<T>::size;
}

template <class T> using Register = typename Kind<T>::Register;
template <class T> using Bits = typename Kind<T>::Bits;

// Selected lanes of one register; the others are not read (zero), or not written.
#if SIDEFX_BYTES == 64
typedef long long Wide __attribute__((vector_size(64)));
template <class T> struct Choice { typedef uint16_t Lanes; };
template <> struct Choice<int64_t> { typedef uint8_t Lanes; };
template <class T> using Chosen = typename Choice<T>::Lanes;

template <class T> SIDEFX_INLINE Chosen<T> every_lane(bool chosen) { return chosen ? Chosen<T>(-1) : 0; }
template <class T> SIDEFX_INLINE Chosen<T> first_lanes(int64_t count) {
    return count >= Kind<T>::size ? Chosen<T>(-1) : count <= 0 ? 0 : Chosen<T>((1u << count) - 1);
}
template <class T> SIDEFX_INLINE bool is_chosen(Chosen<T> chosen, int lane) { return chosen >> lane & 1; }
template <class T> SIDEFX_INLINE bool none_chosen(Chosen<T> chosen) { return chosen == 0; }

SIDEFX_INLINE Register<float> choose(uint16_t chosen, Register<float> yes, Register<float> no) {
    return __builtin_ia32_blendmps_512_mask(no, yes, chosen);
}
SIDEFX_INLINE Register<int32_t> choose(uint16_t chosen, Register<int32_t> yes, Register<int32_t> no) {
    return __builtin_ia32_blendmd_512_mask(no, yes, chosen);
}
SIDEFX_INLINE Register<int64_t> choose(uint8_t chosen, Register<int64_t> yes, Register<int64_t> no) {
    return (Register<int64_t>)__builtin_ia32_blendmq_512_mask((Wide)no, (Wide)yes, chosen);
}

#define SIDEFX_WHERE(name, op, real, whole) \
    SIDEFX_INLINE uint16_t name(Register<float> a, Register<float> b) { \
        return __builtin_ia32_cmpps512_mask(a, b, real, -1, 4); \
    } \
    SIDEFX_INLINE uint16_t name(Register<int32_t> a, Register<int32_t> b) { \
        return __builtin_ia32_cmpd512_mask(a, b, whole, -1); \
    } \
    SIDEFX_INLINE uint8_t name(Register<int64_t> a, Register<int64_t> b) { \
        return __builtin_ia32_cmpq512_mask((Wide)a, (Wide)b, whole, -1); \
    }

SIDEFX_INLINE Register<float> load_some(const float* from, uint16_t chosen) {
    return __builtin_ia32_loadups512_mask(from, Register<float>{}, chosen);
}
SIDEFX_INLINE Register<int32_t> load_some(const int32_t* from, uint16_t chosen) {
    return __builtin_ia32_loaddqusi512_mask(from, Register<int32_t>{}, chosen);
}
SIDEFX_INLINE Register<int64_t> load_some(const int64_t* from, uint8_t chosen) {
    return (Register<int64_t>)__builtin_ia32_loaddqudi512_mask((const long long*)from, Wide{}, chosen);
}
SIDEFX_INLINE void store_some(float* to, Register<float> value, uint16_t chosen) {
    __builtin_ia32_storeups512_mask(to, value, chosen);
}
SIDEFX_INLINE void store_some(int32_t* to, Register<int32_t> value, uint16_t chosen) {
    __builtin_ia32_storedqusi512_mask(to, value, chosen);
}
SIDEFX_INLINE void store_some(int64_t* to, Register<int64_t> value, uint8_t chosen) {
    __builtin_ia32_storedqudi512_mask((long long*)to, (Wide)value, chosen);
}
SIDEFX_INLINE Register<float> square_root(Register<float> x) {
    return __builtin_ia32_sqrtps512_mask(x, Register<float>{}, -1, 4);
}
SIDEFX_INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) {
    return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
}
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_rndscaleps_mask(x, way, Register<float>{}, -1, 4);
}
#else
typedef long long Wide __attribute__((vector_size(32)));
template <class T> using Chosen = Bits<T>;

template <class T> SIDEFX_INLINE Bits<T> every_lane(bool chosen) {
    return Bits<T>{} - static_cast<typename Kind<T>::Integer>(chosen);
}
template <class T> SIDEFX_INLINE Bits<T> first_lanes(int64_t count) {
    return Kind<T>::places() < static_cast<typename Kind<T>::Integer>(count);
}
template <class T> SIDEFX_INLINE bool is_chosen(Bits<T> chosen, int lane) { return chosen[lane] != 0; }
template <class T> SIDEFX_INLINE bool none_chosen(Bits<T> chosen) {
    const Wide wide = (Wide)chosen;
    return (wide[0] | wide[1] | wide[2] | wide[3]) == 0;
}
template <class R, class B> SIDEFX_INLINE R choose(B chosen, R yes, R no) { return chosen ? yes : no; }

#define SIDEFX_WHERE(name, op, real, whole) \
    template <class R> SIDEFX_INLINE auto name(R a, R b) { return a op b; }

SIDEFX_INLINE Register<float> load_some(const float* from, Bits<float> chosen) {
    return __builtin_ia32_maskloadps256((const Register<float>*)from, chosen);
}
SIDEFX_INLINE Register<int32_t> load_some(const int32_t* from, Bits<int32_t> chosen) {
    return __builtin_ia32_maskloadd256((const Register<int32_t>*)from, chosen);
}
SIDEFX_INLINE Register<int64_t> load_some(const int64_t* from, Bits<int64_t> chosen) {
    return (Register<int64_t>)__builtin_ia32_maskloadq256((const Wide*)from, (Wide)chosen);
}
SIDEFX_INLINE void store_some(float* to, Register<float> value, Bits<float> chosen) {
    __builtin_ia32_maskstoreps256((Register<float>*)to, chosen, value);
}
SIDEFX_INLINE void store_some(int32_t* to, Register<int32_t> value, Bits<int32_t> chosen) {
    __builtin_ia32_maskstored256((Register<int32_t>*)to, chosen, value);
}
SIDEFX_INLINE void store_some(int64_t* to, Register<int64_t> value, Bits<int64_t> chosen) {
    __builtin_ia32_maskstoreq256((Wide*)to, (Wide)chosen, (Wide)value);
}
SIDEFX_INLINE Register<float> square_root(Register<float> x) { return __builtin_ia32_sqrtps256(x); }
SIDEFX_INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) {
    return __builtin_ia32_vfmaddps256(a, b, c);
}
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_roundps256(x, way);
}
#endif

SIDEFX_WHERE(equal, ==, 0, 0)
SIDEFX_WHERE(unequal, !=, 4, 4)
SIDEFX_WHERE(below, <, 17, 1)
SIDEFX_WHERE(not_above, <=, 18, 2)
SIDEFX_WHERE(above, >, 30, 6)
SIDEFX_WHERE(not_below, >=, 29, 5)

// Half of a register, and two halves as one; compilers before GCC 12 use memory.
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

// The lanes of one float32 register as half a bfloat16 register, and back; NaN becomes all ones.
typedef uint16_t Narrow __attribute__((vector_size(SIDEFX_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(SIDEFX_BYTES)));
SIDEFX_INLINE Narrow narrowed(Register<float> x) {
    const Words bits = (Words)x, nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words kept = x == x ? nearest : Words{} + 0xffff;
    return __builtin_convertvector(kept, Narrow);
}
SIDEFX_INLINE Register<float> widened(Narrow x) {
#if SIDEFX_BYTES == 64
    const Words wide = __builtin_convertvector(x, Words);
#else
    typedef short Shorts __attribute__((vector_size(16)));
    const Words wide = (Words)__builtin_ia32_pmovzxwd256((Shorts)x);
#endif
    return (Register<float>)(wide << 16);
}

// Halves or doubles the number of lanes per register: ``to`` has as many lanes in total as ``from``, or the first ones.
template <class To, int N, class From, int M> SIDEFX_INLINE void spread(
    Register<To> (&to)[N], const Register<From> (&from)[M]) {
    constexpr int wide = Kind<To>::size, other = Kind<From>::size;
    typedef typename Halves<float>::Half Part;
    if constexpr (is_bfloat16<From>) {
        static_assert(2 * M >= N && wide == Kind<float>::size);
        SIDEFX_EACH {
            const Register<float> whole = (Register<float>)from[i / 2];
            to[i] = widened((Narrow)(i % 2 == 0 ? Halves<float>::low(whole) : Halves<float>::high(whole)));
        }
    } else if constexpr (is_bfloat16<To>) {
        static_assert(2 * N >= M && other == Kind<float>::size);
        SIDEFX_EACH {
            const Narrow low = narrowed(from[2 * i]);
            const Narrow high = 2 * i + 1 < M ? narrowed(from[2 * i + 1 < M ? 2 * i + 1 : 0]) : Narrow{};
            to[i] = (Register<To>)Halves<float>::both((Part)low, (Part)high);
        }
    } else if constexpr (sizeof(To) == 1) {
        typedef To Part __attribute__((vector_size(Kind<From>::size)));
        SIDEFX_EACH to[i] = Register<To>{};
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
            const Part part = __builtin_convertvector(from[i], Part);
            __builtin_memcpy((char*)to + i * sizeof part, &part, sizeof part);
        }
    } else if constexpr (sizeof(From) == 1) {
        typedef From Part __attribute__((vector_size(Kind<To>::size)));
        SIDEFX_EACH {
            Part part;
            __builtin_memcpy(&part, (const char*)from + i * sizeof part, sizeof part);
            to[i] = __builtin_convertvector(part, Register<To>);
        }
    } else if constexpr (wide == other) {
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
    SIDEFX_METHOD(rsqrt, 1.0f / square_root(x))
    SIDEFX_METHOD(reciprocal, 1.0f / x)
    SIDEFX_METHOD(exp, SIDEFX_SLEEF(exp, u10)(x))
    SIDEFX_METHOD(expm1, SIDEFX_SLEEF(expm1, u10)(x))
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

// All ones, which is NaN, if either is NaN.
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
