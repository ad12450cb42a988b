"""C++ shared by native modules: vectors that stay in registers, transposed blocks of numbers, workspaces."""

REGISTERS = r"""
#if defined(__AVX512F__)
#define SIDEFX_LANES 16
#elif defined(__AVX__)
#define SIDEFX_LANES 8
#else
#define SIDEFX_LANES 4
#endif

namespace registers {

constexpr int64_t LANES = SIDEFX_LANES;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));  // unaligned
typedef int32_t Places __attribute__((vector_size(4 * LANES)));

static inline Lanes everywhere(float value) {
#ifdef __clang__
    Lanes made;
    for (int l = 0; l < LANES; ++l) made[l] = value;
    return made;
#else
    return value - Lanes{};
#endif
}

static inline Lanes choose(Lanes first, Lanes second, Places places) {
#ifdef __clang__
    Lanes made;
    for (int l = 0; l < LANES; ++l) made[l] = places[l] < LANES ? first[places[l]] : second[places[l] - LANES];
    return made;
#else
    return __builtin_shuffle(first, second, places);
#endif
}

// maximum or minimum of two numbers; the second if one is NaN
#if defined(__clang__)
static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
static inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
#elif defined(__AVX512F__)
#define SIDEFX_OF(FUNCTION) (Lanes) __builtin_ia32_##FUNCTION##ps512_mask(a, b, Lanes{}, (uint16_t)-1, 4)
static inline Lanes larger(Lanes a, Lanes b) { return SIDEFX_OF(max); }
static inline Lanes smaller(Lanes a, Lanes b) { return SIDEFX_OF(min); }
#elif defined(__AVX__)
static inline Lanes larger(Lanes a, Lanes b) { return (Lanes)__builtin_ia32_maxps256(a, b); }
static inline Lanes smaller(Lanes a, Lanes b) { return (Lanes)__builtin_ia32_minps256(a, b); }
#else
static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
static inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
#endif

// Exchanges blocks of STEP lanes between rows: one stage of a transpose.
template <int STEP>
static inline void exchange(Lanes* held) {
    Places low, high;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; ++l) {
        low[l] = l & STEP ? LANES + l - STEP : l;
        high[l] = l & STEP ? LANES + l : l + STEP;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
        if (i & STEP) continue;
        const Lanes first = held[i], second = held[i + STEP];
        held[i] = choose(first, second, low);
        held[i + STEP] = choose(first, second, high);
    }
}

// Transposes a block of LANES x LANES.
static inline void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    Lanes held[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) held[i] = *(const Loose*)(from + i * from_row);
    exchange<1>(held);
    exchange<2>(held);
#if SIDEFX_LANES > 4
    exchange<4>(held);
#endif
#if SIDEFX_LANES > 8
    exchange<8>(held);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) *(Loose*)(to + i * to_row) = held[i];
}

struct Workspace {  // scratch memory that grows
    float* at = nullptr;
    int64_t size = 0;
    ~Workspace() { delete[] at; }
    float* of(int64_t wanted) {
        if (wanted > size) {
            delete[] at;
            at = nullptr, size = 0;  // out of memory
            at = new float[wanted];
            size = wanted;
        }
        return at;
    }
};

// The first aligned address, at most LANES numbers on.
static inline float* aligned(float* at) {
    constexpr uintptr_t bytes = sizeof(Lanes);
    return (float*)(((uintptr_t)at + bytes - 1) / bytes * bytes);
}

}  // namespace registers
"""
