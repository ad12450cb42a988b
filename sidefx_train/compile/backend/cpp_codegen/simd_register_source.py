"""SIMD registers in C++: one register of the CPU's vectors, its selected lanes, and conversions between types of lanes.

A mask has one bit per lane if the CPU has mask registers (AVX-512), and is a vector of ones and zeros otherwise; only
the functions on ``Chosen`` lanes differ. Processor instructions are named here alone, ``simd_source.py`` is made of
these functions.
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
SIDEFX_KIND(double, int64_t, SIDEFX_EIGHT)
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
template <> struct Choice<double> { typedef uint8_t Lanes; };
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
SIDEFX_INLINE Register<double> choose(uint8_t chosen, Register<double> yes, Register<double> no) {
    return __builtin_ia32_blendmpd_512_mask(no, yes, chosen);
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
    SIDEFX_INLINE uint8_t name(Register<double> a, Register<double> b) { \
        return __builtin_ia32_cmppd512_mask(a, b, real, -1, 4); \
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
SIDEFX_INLINE Register<double> load_some(const double* from, uint8_t chosen) {
    return __builtin_ia32_loadupd512_mask(from, Register<double>{}, chosen);
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
SIDEFX_INLINE void store_some(double* to, Register<double> value, uint8_t chosen) {
    __builtin_ia32_storeupd512_mask(to, value, chosen);
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
SIDEFX_INLINE Register<double> square_root(Register<double> x) {
    return __builtin_ia32_sqrtpd512_mask(x, Register<double>{}, -1, 4);
}
SIDEFX_INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) {
    return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
}
SIDEFX_INLINE Register<double> fused(Register<double> a, Register<double> b, Register<double> c) {
    return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
}
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_rndscaleps_mask(x, way, Register<float>{}, -1, 4);
}
template <int way> SIDEFX_INLINE Register<double> rounded(Register<double> x) {
    return __builtin_ia32_rndscalepd_mask(x, way, Register<double>{}, -1, 4);
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
SIDEFX_INLINE Register<double> load_some(const double* from, Bits<double> chosen) {
    return __builtin_ia32_maskloadpd256((const Register<double>*)from, (Wide)chosen);
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
SIDEFX_INLINE void store_some(double* to, Register<double> value, Bits<double> chosen) {
    __builtin_ia32_maskstorepd256((Register<double>*)to, (Wide)chosen, value);
}
SIDEFX_INLINE void store_some(int32_t* to, Register<int32_t> value, Bits<int32_t> chosen) {
    __builtin_ia32_maskstored256((Register<int32_t>*)to, chosen, value);
}
SIDEFX_INLINE void store_some(int64_t* to, Register<int64_t> value, Bits<int64_t> chosen) {
    __builtin_ia32_maskstoreq256((Wide*)to, (Wide)chosen, (Wide)value);
}
SIDEFX_INLINE Register<float> square_root(Register<float> x) { return __builtin_ia32_sqrtps256(x); }
SIDEFX_INLINE Register<double> square_root(Register<double> x) { return __builtin_ia32_sqrtpd256(x); }
SIDEFX_INLINE Register<float> fused(Register<float> a, Register<float> b, Register<float> c) {
    return __builtin_ia32_vfmaddps256(a, b, c);
}
SIDEFX_INLINE Register<double> fused(Register<double> a, Register<double> b, Register<double> c) {
    return __builtin_ia32_vfmaddpd256(a, b, c);
}
template <int way> SIDEFX_INLINE Register<float> rounded(Register<float> x) {
    return __builtin_ia32_roundps256(x, way);
}
template <int way> SIDEFX_INLINE Register<double> rounded(Register<double> x) {
    return __builtin_ia32_roundpd256(x, way);
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
template <> SIDEFX_INLINE Register<double> without_order<double>(
    Register<double> found, Register<double> a, Register<double> b) {
#if SIDEFX_BYTES == 64
    const auto none = __builtin_ia32_cvtmask2q512(__builtin_ia32_cmppd512_mask(a, b, 3, -1, 4));
#else
    const auto none = __builtin_ia32_cmppd256(a, b, 3);
#endif
    return (Register<double>)((Bits<double>)found | (Bits<double>)none);
}

#define SIDEFX_FUNCTIONS_OF_REGISTERS(name, narrow, wide) \
    SIDEFX_INLINE Register<float> name##_of(Register<float> x) { \
        return SIDEFX_SLEEF(SIDEFX_FLOATS, name, narrow)(x); \
    } \
    SIDEFX_INLINE Register<double> name##_of(Register<double> x) { \
        return SIDEFX_SLEEF(SIDEFX_DOUBLES, name, wide)(x); \
    }
SIDEFX_UNARY_OF_SLEEF(SIDEFX_FUNCTIONS_OF_REGISTERS)

#define SIDEFX_FUNCTION_OF_TWO_REGISTERS(name, floats, doubles) \
    SIDEFX_INLINE Register<float> name##_of(Register<float> x, Register<float> y) { return floats(x, y); } \
    SIDEFX_INLINE Register<double> name##_of(Register<double> x, Register<double> y) { return doubles(x, y); }
#define SIDEFX_FUNCTION_OF_TWO_OF_SLEEF(name, accuracy) \
    SIDEFX_FUNCTION_OF_TWO_REGISTERS( \
        name, SIDEFX_SLEEF(SIDEFX_FLOATS, name, accuracy), SIDEFX_SLEEF(SIDEFX_DOUBLES, name, accuracy))
SIDEFX_FUNCTION_OF_TWO_OF_SLEEF(pow, u10)
SIDEFX_FUNCTION_OF_TWO_OF_SLEEF(atan2, u10)
SIDEFX_FUNCTION_OF_TWO_OF_SLEEF(hypot, u05)
SIDEFX_FUNCTION_OF_TWO_REGISTERS(fmod, SIDEFX_FLOATS(fmod), SIDEFX_DOUBLES(fmod))
SIDEFX_FUNCTION_OF_TWO_REGISTERS(copysign, SIDEFX_FLOATS(copysign), SIDEFX_DOUBLES(copysign))

// Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
__attribute__((noinline, optimize("fp-contract=fast"), unused)) static Register<float> erf_of(Register<float> x) {
    const Bits<float> sign = (Bits<float>)x & INT32_MIN;
    const Register<float> t = 1.0f / (0.3275911f * (Register<float>)((Bits<float>)x ^ sign) + 1.0f);
    Register<float> r = 1.061405429f * t + -1.453152027f;
    r = r * t + 1.421413741f;
    r = r * t + -0.284496736f;
    r = r * t + 0.254829592f;
    const Register<float> square = x * x;
    const Register<float> power = -exp_of(-square);
    const Register<float> scaled = power * t;
    return (Register<float>)((Bits<float>)(scaled * r + 1.0f) ^ sign);
}
SIDEFX_INLINE Register<double> erf_of(Register<double> x) { return SIDEFX_SLEEF(SIDEFX_DOUBLES, erf, u10)(x); }
"""
