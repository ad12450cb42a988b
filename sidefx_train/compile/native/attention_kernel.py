"""C++ of the native module: attention and its derivative, head by head, without storing all weights.

It processes one block of queries and one block of keys at a time. Queries are the lanes of the vectors, keys are the
rows: the maximum of a query, the sum of its weights and the mask are operations on whole vectors, and the next products
read the blocks without copies. A softmax over more keys than a block has is rescaled block by block. The derivative
recomputes the weights from the log-sum-exp. Blocks hidden by a causal mask are skipped, and in diagonal blocks the
hidden part of each tile.
"""

from sidefx_train.compile.native.simd_registers import REGISTERS

SOURCE = r"""
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
@REGISTERS@
#if defined(__AVX512F__)
#define SIDEFX_WIDE 4
#else
#define SIDEFX_WIDE 2
#endif

namespace attention {

using namespace registers;

constexpr int64_t WIDE = SIDEFX_WIDE;  // vectors per tile, at most
constexpr int64_t QUERIES = 64;  // queries per block
constexpr int64_t KEYS = 128;  // keys per block
constexpr int TALL = LANES < 8 ? 4 : 8, LOW = 4;  // rows of a tile: at most LANES, all hidden by a mask
constexpr int64_t STEP = TALL;  // multiple to which rows are rounded up
constexpr int64_t ALONE = 1500000;  // floating-point operations below which one thread is done before two have begun
constexpr int64_t KEPT = 1 << 18;  // numbers up to which a thread keeps its workspace
constexpr int64_t FAR = 1 << 30;
constexpr float BITS = 1.44269504f, NATURAL = 0.693147181f;  // log2(e) and its inverse

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }

static inline int64_t rounded(int64_t size, int64_t to) { return parts(size, to) * to; }

#define SIDEFX_ALL _Pragma("GCC unroll 8")  // even at a low optimization level

// 2 ** x, 0 below -126: a polynomial that fits on [-0.5, 0.5], times a power of 2
static inline Lanes power(Lanes x) {
    x = larger(everywhere(-127.0f), x);
    const float magic = 12582912.0f;  // its last bit has the value 1, so adding it rounds to an integer
    const Lanes shifted = x + magic, r = x - (shifted - magic);
    Lanes made = r * 1.32647271e-3f + 9.67151281e-3f;
    made = made * r + 5.55073374e-2f;
    made = made * r + 0.240222421f;
    made = made * r + 0.693146978f;
    made = made * r + 1.0f;
    return made * (Lanes)(((Places)shifted << 23) + (127 << 23));
}

static inline Places count_up(int64_t from) {
    Places made;
    SIDEFX_ALL for (int l = 0; l < LANES; ++l) made[l] = (int32_t)from + l;
    return made;
}

// --- products ----------------------------------------------------------------------------------------------------

// R rows of V vectors of a product; a is read by rows of a_row numbers, or by columns
template <int R, int V>
__attribute__((always_inline)) static inline void multiply(const float* a, int64_t a_row, int64_t a_column,
                                                           const float* b, int64_t b_row, int64_t depth,
                                                           Lanes (&sum)[R][V]) {
    for (int64_t k = 0; k < depth; ++k) {
        Lanes right[V];
        SIDEFX_ALL for (int j = 0; j < V; ++j) right[j] = *(const Lanes*)(b + k * b_row + j * LANES);
        SIDEFX_ALL for (int i = 0; i < R; ++i) {
            const Lanes left = everywhere(a[i * a_row + k * a_column]);
            SIDEFX_ALL for (int j = 0; j < V; ++j) sum[i][j] += left * right[j];
        }
    }
}

// out = a b, or out += a b; within a row of a tile, begin and end of depth move with the rows
template <int R, int V>
__attribute__((noinline)) static void tiles(const float* a, int64_t a_row, int64_t a_column, const float* b,
                                            float* out, int64_t row, int64_t rows, int64_t depth, int64_t begin,
                                            int64_t end, bool more) {
    for (int64_t i = 0; i < rows; i += R) {
        const int64_t first = most(0, i + begin), last = least(depth, i + R + end);
        Lanes sum[R][V];
        SIDEFX_ALL for (int r = 0; r < R; ++r)
            SIDEFX_ALL for (int j = 0; j < V; ++j)
                sum[r][j] = more ? *(const Lanes*)(out + (i + r) * row + j * LANES) : Lanes{};
        multiply<R, V>(a + i * a_row + first * a_column, a_row, a_column, b + first * row, row, last - first, sum);
        SIDEFX_ALL for (int r = 0; r < R; ++r)
            SIDEFX_ALL for (int j = 0; j < V; ++j) *(Lanes*)(out + (i + r) * row + j * LANES) = sum[r][j];
    }
}

// product of rows of the width of a head
static void product(const float* a, int64_t a_row, int64_t a_column, const float* b, float* out, int64_t row,
                    int64_t rows, int64_t depth, int64_t begin, int64_t end, bool more) {
    for (int64_t column = 0; column < row; column += WIDE * LANES) {
        const float* from = b + column;
        float* to = out + column;
        switch (least(WIDE, (row - column) / LANES)) {
            case 1: tiles<TALL, 1>(a, a_row, a_column, from, to, row, rows, depth, begin, end, more); break;
#if SIDEFX_WIDE == 4
            case 2: tiles<TALL, 2>(a, a_row, a_column, from, to, row, rows, depth, begin, end, more); break;
            case 3: tiles<TALL, 3>(a, a_row, a_column, from, to, row, rows, depth, begin, end, more); break;
            case 4: tiles<LOW, 4>(a, a_row, a_column, from, to, row, rows, depth, begin, end, more); break;
#else
            case 2: tiles<LOW, 2>(a, a_row, a_column, from, to, row, rows, depth, begin, end, more); break;
#endif
        }
    }
}

// --- rows --------------------------------------------------------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));  // bfloat16
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

static inline Lanes load(const float* from) { return *(const Loose*)from; }

static inline Lanes load(const uint16_t* from) {
    return (Lanes)(__builtin_convertvector(*(const Halves*)from, Bits) << 16);
}

static inline float load_one(const float* from) { return *from; }

static inline float load_one(const uint16_t* from) { return __builtin_bit_cast(float, (uint32_t)*from << 16); }

static inline void store(float* to, Lanes value) { *(Loose*)to = value; }

static inline void store(uint16_t* to, Lanes value) {
    const Bits bits = (Bits)value, near = bits + 0x7FFF + (bits >> 16 & 1);
    *(Halves*)to = __builtin_convertvector((value == value ? near : Bits{} + 0x7FC00000) >> 16, Halves);
}

static inline void store_one(float* to, float value) { *to = value; }

static inline void store_one(uint16_t* to, float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    *to = value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct Heads {  // tensor [rows, heads, length, width]
    char* data;
    int64_t row, head, place, unit;  // strides in elements
    bool narrow;

    // offset of the head with this number
    template <class Number>
    Number* at(int64_t which, int64_t heads, int64_t where) const {
        return (Number*)data + which / heads * row + which % heads * head + where * place;
    }
};

struct Part {  // some positions of a head
    const Heads& of;
    int64_t which, heads, where;

    template <class Number>
    Number* data() const { return of.at<Number>(which, heads, where); }
};

template <class Number>
static void pack_rows(const Part& part, int64_t count, int64_t width, float* to, int64_t row, float factor) {
    const Number* from = part.data<Number>();
    for (int64_t i = 0; i < count; ++i, from += part.of.place, to += row) {
        int64_t j = 0;
        if (part.of.unit == 1)
            for (; j + LANES <= width; j += LANES) *(Lanes*)(to + j) = load(from + j) * factor;
        for (; j < row; ++j) to[j] = j < width ? load_one(from + j * part.of.unit) * factor : 0.0f;
    }
}

// Copies rows, zero-padded beyond width and count; optionally scaled.
static void pack(const Part& part, int64_t count, int64_t rows, int64_t width, float* to, int64_t row,
                 float factor = 1.0f) {
    (part.of.narrow ? pack_rows<uint16_t> : pack_rows<float>)(part, count, width, to, row, factor);
    for (int64_t j = count * row; j < rows * row; j += LANES) *(Lanes*)(to + j) = Lanes{};
}

template <class Number>
static void unpack_rows(const float* from, int64_t row, int64_t count, int64_t width, const Part& part,
                        const float* factors, float factor) {
    Number* to = part.data<Number>();
    for (int64_t i = 0; i < count; ++i, from += row, to += part.of.place) {
        if (factors) factor = factors[i];
        int64_t j = 0;
        if (part.of.unit == 1)
            for (; j + LANES <= width; j += LANES) store(to + j, *(const Lanes*)(from + j) * factor);
        for (; j < width; ++j) store_one(to + j * part.of.unit, from[j] * factor);
    }
}

// Copies rows back; each times its own factor, or all times 1.
static void unpack(const float* from, int64_t row, int64_t count, int64_t width, const Part& part,
                   const float* factors, float factor = 1.0f) {
    (part.of.narrow ? unpack_rows<uint16_t> : unpack_rows<float>)(from, row, count, width, part, factors, factor);
}

// Products of each of LANES rows, up to count, with a packed one.
template <class Number>
static Lanes products_of(const Part& part, const float* packed, int64_t row, int64_t count, int64_t width) {
    const Number* from = part.data<Number>();
    alignas(64) float held[LANES * LANES] = {};
    for (int64_t l = 0; l < least(LANES, count); ++l, from += part.of.place, packed += row) {
        Lanes sum{};
        int64_t c = 0;
        if (part.of.unit == 1)
            for (; c + LANES <= width; c += LANES) sum += load(from + c) * *(const Lanes*)(packed + c);
        for (; c < width; ++c) sum[c % LANES] += load_one(from + c * part.of.unit) * packed[c];
        *(Lanes*)(held + l * LANES) = sum;
    }
    transpose(held, LANES, held, LANES);
    Lanes sum{};
    for (int64_t l = 0; l < LANES; ++l) sum += *(const Lanes*)(held + l * LANES);
    return sum;
}

// Packed rows of a block of queries as columns.
static void transpose_block(const float* from, int64_t row, int64_t vectors, float* to) {
    for (int64_t j = 0; j < row; j += LANES)
        for (int64_t i = 0; i < vectors * LANES; i += LANES)
            transpose(from + i * row + j, row, to + j * QUERIES + i, QUERIES);
}

// --- blocks ------------------------------------------------------------------------------------------------------

struct Sizes {
    int64_t heads, head, queries, keys, width;
    bool causal;
    float scale;

    int64_t row() const { return rounded(width, LANES); }
    int64_t query_blocks() const { return parts(queries, QUERIES); }
    int64_t key_blocks() const { return parts(keys, KEYS); }
    bool seen(int64_t key, int64_t query) const { return !causal || query + QUERIES > key; }
    int64_t threads() const { return 4 * heads * queries * keys * width < ALONE ? 1 : omp_get_max_threads(); }
};

// Index of the first vector of queries in a block that sees a key.
static inline int64_t first_vector(bool causal, int64_t key, int64_t query) {
    return causal && key > query ? (key - query) / LANES : 0;
}

struct Keys {  // a block of keys, and of values
    float *keys, *values;
    int64_t held = -1;
};

// Visible part of a tile whose first key is key, and whose vector j begins at query.
template <int R, int V>
__attribute__((always_inline)) static inline void hide(Lanes (&sum)[R][V], int64_t key, int64_t query, float instead) {
    SIDEFX_ALL for (int j = 0; j < V; ++j) {
        if (query + j * LANES >= key + R - 1) continue;
        const Places places = count_up(query + j * LANES);
        SIDEFX_ALL for (int r = 0; r < R; ++r)
            sum[r][j] = places >= (int32_t)(key + r) ? sum[r][j] : everywhere(instead);
    }
}

// Scores of R keys and V vectors of queries, and the maximum of each query.
template <int R, int V>
__attribute__((noinline)) static void score(const float* keys, int64_t row, const float* queries, int64_t width,
                                            float* to, float* top, int64_t key, int64_t query, bool causal,
                                            int64_t count) {
    for (int64_t k = 0; k < count; k += R) {
        Lanes sum[R][V];
        SIDEFX_ALL for (int r = 0; r < R; ++r) SIDEFX_ALL for (int j = 0; j < V; ++j) sum[r][j] = Lanes{};
        multiply<R, V>(keys + k * row, row, 1, queries, QUERIES, width, sum);
        if (causal && key + k + R - 1 > query) hide<R, V>(sum, key + k, query, -__builtin_inff());
        SIDEFX_ALL for (int j = 0; j < V; ++j) {
            Lanes best = *(const Lanes*)(top + j * LANES);
            SIDEFX_ALL for (int r = 0; r < R; ++r) {
                best = larger(best, sum[r][j]);
                *(Lanes*)(to + (k + r) * QUERIES + j * LANES) = sum[r][j];
            }
            *(Lanes*)(top + j * LANES) = best;
        }
    }
}

// Calls a function with the number of vectors, for runs of keys seen from the same vector on.
template <class Call>
static inline void by_vectors(int64_t key, int64_t keys, int64_t query, int64_t vectors, bool causal, Call call) {
    for (int64_t k = 0; k < keys;) {
        const int64_t first = first_vector(causal, key + k, query);
        const int64_t end = causal && key + keys > query + LANES
                                ? least(keys, query + (first + 1) * LANES - key) : keys;
        for (int64_t j = first; j < vectors; j += WIDE) call(k, end - k, j, least(WIDE, vectors - j));
        k = end;
    }
}

struct Forward : Sizes {
    Heads q, k, v, out;
    float* sums;  // base-2 log-sum-exp of each query

    struct Space {
        Keys block;
        float *natural, *transposed, *weights, *made, *top, *total, *factor;
    };

    int64_t workspace_size() const {
        return 2 * (KEYS + STEP) * row() + 3 * QUERIES * row() + (KEYS + STEP) * QUERIES + 3 * QUERIES + LANES;
    }

    Space divide(float* at) const {
        auto take = [&](int64_t size) { float* taken = at; at += size; return taken; };
        const int64_t wide = (KEYS + STEP) * row(), block = QUERIES * row();
        return {{take(wide), take(wide)}, take(block), take(block), take((KEYS + STEP) * QUERIES), take(block),
                take(QUERIES), take(QUERIES), take(QUERIES)};
    }

    void hold(Keys& block, int64_t which, int64_t at) const {
        if (block.held == which * key_blocks() + at) return;
        const int64_t key = at * KEYS, count = least(KEYS, keys - key);
        pack({k, which, head, key}, count, count, width, block.keys, row());
        for (int64_t i = count; i < rounded(count, STEP); ++i)  // repeats the last one, for the maximum
            for (int64_t j = 0; j < row(); ++j) block.keys[i * row() + j] = block.keys[(count - 1) * row() + j];
        pack({v, which, head, key}, count, count, width, block.values, row());
        block.held = which * key_blocks() + at;
    }

    void run(int64_t which, int64_t at, Space& ws) const {
        const int64_t query = at * QUERIES, count = least(QUERIES, queries - query), vectors = parts(count, LANES);
        pack({q, which, head, query}, count, vectors * LANES, width, ws.natural, row(), scale * BITS);
        transpose_block(ws.natural, row(), vectors, ws.transposed);
        for (int64_t i = 0; i < QUERIES; ++i) ws.top[i] = -__builtin_inff(), ws.total[i] = 0.0f;
        for (int64_t b = 0; b < key_blocks() && seen(b * KEYS, query); ++b) {
            hold(ws.block, which, b);
            const int64_t key = b * KEYS;
            const int64_t here = least(KEYS, least(keys - key, causal ? query + rounded(count, LANES) - key : FAR));
            float before[QUERIES];
            for (int64_t i = 0; i < QUERIES; ++i) before[i] = ws.top[i];
            by_vectors(key, here, query, vectors, causal, [&](int64_t k, int64_t some, int64_t j, int64_t wide) {
                auto call = [&](auto function) {
                    function(ws.block.keys + k * row(), row(), ws.transposed + j * LANES, width,
                             ws.weights + k * QUERIES + j * LANES, ws.top + j * LANES, key + k, query + j * LANES,
                             causal, some);
                };
                switch (wide) {
                    case 1: call(score<TALL, 1>); break;
#if SIDEFX_WIDE == 4
                    case 2: call(score<TALL, 2>); break;
                    case 3: call(score<LOW, 3>); break;
                    case 4: call(score<LOW, 4>); break;
#else
                    case 2: call(score<LOW, 2>); break;
#endif
                }
            });
            for (int64_t j = 0; j < vectors; ++j) weigh(ws, before, key, here, query, j);
            if (b)
                for (int64_t i = 0; i < count; ++i)
                    for (int64_t c = 0; c < row(); c += LANES)
                        *(Lanes*)(ws.made + i * row() + c) *= ws.factor[i];
            product(ws.weights, 1, QUERIES, ws.block.values, ws.made, row(), vectors * LANES, here, -FAR,
                    causal ? query - key : FAR, b > 0);
        }
        for (int64_t i = 0; i < count; ++i) {
            const bool none = ws.total[i] == 0.0f;  // all scores are minus infinity: zeros, as in torch's kernel
            sums[which * queries + query + i] = none ? 0.0f : ws.top[i] + __builtin_log2f(ws.total[i]);
            ws.factor[i] = none ? 0.0f : 1.0f / ws.total[i];
        }
        unpack(ws.made, row(), count, width, {out, which, head, query}, ws.factor);
    }

    // Exponentiates the scores of one vector of queries.
    void weigh(Space& ws, const float* before, int64_t key, int64_t here, int64_t query, int64_t j) const {
        const Lanes found = *(const Lanes*)(ws.top + j * LANES);
        const Lanes top = found == -__builtin_inff() ? Lanes{} : found;
        const Lanes factor = power(*(const Loose*)(before + j * LANES) - top);
        const int64_t last = causal ? least(here, query + (j + 1) * LANES - key) : here;
        Lanes sum[2] = {*(const Lanes*)(ws.total + j * LANES) * factor, Lanes{}};
        float* at = ws.weights + j * LANES;
        int64_t i = 0;
        for (; i + 4 <= last; i += 4) {
            SIDEFX_ALL for (int r = 0; r < 4; ++r) {
                Lanes* mine = (Lanes*)(at + (i + r) * QUERIES);
                *mine = power(*mine - top);
                sum[r % 2] += *mine;
            }
        }
        for (; i < last; ++i) {
            Lanes* mine = (Lanes*)(at + i * QUERIES);
            *mine = power(*mine - top);
            sum[0] += *mine;
        }
        *(Lanes*)(ws.total + j * LANES) = sum[0] + sum[1];
        *(Lanes*)(ws.factor + j * LANES) = factor;
    }
};

// --- backward ----------------------------------------------------------------------------------------------------

// Weights of R keys and V vectors of queries, and the gradients of their scores.
template <int R, int V>
__attribute__((noinline)) static void unscore(const float* keys, const float* values, int64_t row,
                                              const float* queries, const float* grads, int64_t width, float* weights,
                                              float* inner, const float* sums, const float* drawn, int64_t key,
                                              int64_t query, bool causal, int64_t count) {
    for (int64_t k = 0; k < count; k += R) {
        Lanes sum[R][V];
        SIDEFX_ALL for (int r = 0; r < R; ++r) SIDEFX_ALL for (int j = 0; j < V; ++j) sum[r][j] = Lanes{};
        multiply<R, V>(keys + k * row, row, 1, queries, QUERIES, width, sum);
        SIDEFX_ALL for (int j = 0; j < V; ++j)
            SIDEFX_ALL for (int r = 0; r < R; ++r)
                sum[r][j] = power(sum[r][j] - *(const Lanes*)(sums + j * LANES));
        if (causal && key + k + R - 1 > query) hide<R, V>(sum, key + k, query, 0.0f);
        SIDEFX_ALL for (int j = 0; j < V; ++j)
            SIDEFX_ALL for (int r = 0; r < R; ++r) {
                *(Lanes*)(weights + (k + r) * QUERIES + j * LANES) = sum[r][j];
                sum[r][j] = Lanes{};
            }
        multiply<R, V>(values + k * row, row, 1, grads, QUERIES, width, sum);
        SIDEFX_ALL for (int j = 0; j < V; ++j)
            SIDEFX_ALL for (int r = 0; r < R; ++r) {
                const int64_t at = (k + r) * QUERIES + j * LANES;
                const Lanes weight = *(const Lanes*)(weights + at);
                *(Lanes*)(inner + at) = weight * (sum[r][j] - *(const Lanes*)(drawn + j * LANES));
            }
    }
}

struct Backward : Sizes {
    Heads q, k, v, out;
    const float* sums;
    Heads grad, dq, dk, dv;

    struct Space {
        float *keys, *values, *d_keys, *d_values, *queries, *transposed, *grads, *grads_transposed, *weights, *inner,
            *sums, *drawn;
    };

    int64_t workspace_size() const {
        return 4 * (KEYS + STEP) * row() + 4 * QUERIES * row() + 2 * (KEYS + STEP) * QUERIES + 2 * QUERIES + LANES;
    }

    Space divide(float* at) const {
        auto take = [&](int64_t size) { float* taken = at; at += size; return taken; };
        const int64_t wide = (KEYS + STEP) * row(), block = QUERIES * row(), square = (KEYS + STEP) * QUERIES;
        return {take(wide), take(wide), take(wide), take(wide), take(block), take(block), take(block), take(block),
                take(square), take(square), take(QUERIES), take(QUERIES)};
    }

    int64_t made_size() const { return rounded(queries, QUERIES) * row(); }

    // Inputs and outputs of a block of queries.
    void take_queries(int64_t which, int64_t query, int64_t count, int64_t vectors, Space& ws) const {
        pack({q, which, head, query}, count, vectors * LANES, width, ws.queries, row(), scale * BITS);
        transpose_block(ws.queries, row(), vectors, ws.transposed);
        pack({grad, which, head, query}, count, vectors * LANES, width, ws.grads, row());
        transpose_block(ws.grads, row(), vectors, ws.grads_transposed);
        for (int64_t i = 0; i < vectors * LANES; i += LANES)
            *(Lanes*)(ws.drawn + i) = (out.narrow ? products_of<uint16_t> : products_of<float>)(
                {out, which, head, query + i}, ws.grads + i * row(), row(), count - i, width);
        for (int64_t i = 0; i < vectors * LANES; ++i)
            ws.sums[i] = i < count ? sums[which * queries + query + i] : 0.0f;
    }

    // Blocks of keys first, first + step, ... of one head; gradients of their queries are accumulated in made.
    void run(int64_t which, int64_t first, int64_t step, float* made, Space& ws) const {
        for (int64_t b = first; b < key_blocks(); b += step) {
            const int64_t key = b * KEYS, count = least(KEYS, keys - key), padded = rounded(count, STEP);
            pack({k, which, head, key}, count, padded, width, ws.keys, row());
            pack({v, which, head, key}, count, padded, width, ws.values, row());
            int64_t began = 0;
            for (int64_t at = causal ? least(key / QUERIES, query_blocks()) : 0; at < query_blocks(); ++at)
                meet(which, at, key, count, made, b > first, began++ > 0, ws);
            if (!began)
                for (int64_t i = 0; i < padded * row(); ++i) ws.d_keys[i] = ws.d_values[i] = 0.0f;
            unpack(ws.d_keys, row(), count, width, {dk, which, head, key}, nullptr, NATURAL);
            unpack(ws.d_values, row(), count, width, {dv, which, head, key}, nullptr);
        }
    }

    void meet(int64_t which, int64_t at, int64_t key, int64_t count, float* made, bool more, bool more_keys,
              Space& ws) const {
        const int64_t query = at * QUERIES, some = least(QUERIES, queries - query), vectors = parts(some, LANES);
        take_queries(which, query, some, vectors, ws);
        const int64_t here = least(count, causal ? query + vectors * LANES - key : FAR), padded = rounded(here, STEP);
        by_vectors(key, here, query, vectors, causal, [&](int64_t k, int64_t few, int64_t j, int64_t wide) {
            auto call = [&](auto function) {
                const int64_t to = k * QUERIES + j * LANES;
                function(ws.keys + k * row(), ws.values + k * row(), row(), ws.transposed + j * LANES,
                         ws.grads_transposed + j * LANES, width, ws.weights + to, ws.inner + to,
                         ws.sums + j * LANES, ws.drawn + j * LANES, key + k, query + j * LANES, causal, few);
            };
            switch (wide) {
                case 1: call(unscore<TALL, 1>); break;
#if SIDEFX_WIDE == 4
                case 2: call(unscore<TALL, 2>); break;
                case 3: call(unscore<LOW, 3>); break;
                case 4: call(unscore<LOW, 4>); break;
#else
                case 2: call(unscore<LOW, 2>); break;
#endif
            }
        });
        const int64_t begin = causal ? key - query : -FAR;
        product(ws.weights, QUERIES, 1, ws.grads, ws.d_values, row(), padded, some, begin, FAR, more_keys);
        product(ws.inner, QUERIES, 1, ws.queries, ws.d_keys, row(), padded, some, begin, FAR, more_keys);
        if (!more_keys)  // keys that the first block of queries does not see
            for (int64_t i = padded * row(); i < rounded(count, STEP) * row(); ++i)
                ws.d_keys[i] = ws.d_values[i] = 0.0f;
        product(ws.inner, 1, QUERIES, ws.keys, made + query * row(), row(), vectors * LANES, here, -FAR,
                causal ? query - key : FAR, more);
    }

    // Gradient of a head's queries: the sum over the parts whose first block of keys is visible.
    void collect(int64_t which, float* made, int64_t parts, int64_t next) const {
        for (int64_t p = 1; p < parts; ++p)
            for (int64_t i = causal ? p * KEYS * row() : 0; i < queries * row(); i += LANES)
                *(Lanes*)(made + i) += *(const Lanes*)(made + p * next + i);
        unpack(made, row(), queries, width, {dq, which, head, 0}, nullptr, scale);
    }
};

static Sizes sizes(const int64_t* n) {
    return {n[0] * n[1], n[1], n[2], n[3], n[4], (n[5] & 1) != 0, (float)__builtin_bit_cast(double, n[6])};
}

static Heads heads(const int64_t* n, bool narrow) { return {(char*)n[0], n[1], n[2], n[3], n[4], narrow}; }

// n: rows, heads, queries, keys, width, flags (1: causal, 2: bfloat16), bits of the scale; q, k, v, out, each with
// strides; the base-2 log-sum-exp
static void forward(const int64_t* n) {
    auto of = [=](int64_t at) { return heads(n + at, n[5] & 2); };
    const Forward run{sizes(n), of(7), of(12), of(17), of(22), (float*)n[27]};
    const int64_t threads = run.threads(), blocks = run.query_blocks();
    const int64_t together = run.heads >= 4 * threads ? blocks : 1;  // enough heads: one thread per head
    const int64_t tasks = run.heads * blocks / together;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        thread_local Workspace kept;
        Workspace own;
        auto ws = run.divide(aligned((run.workspace_size() > KEPT ? own : kept).of(run.workspace_size())));
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            if (together > 1)
                for (int64_t at = 0; at < blocks; ++at) run.run(task, at, ws);
            else  // longest blocks first
                run.run(task / blocks, blocks - 1 - task % blocks, ws);
        }
    }
}

// n: arguments of forward; gradients of out, q, k and v, each with strides
static void backward(const int64_t* n) {
    auto of = [=](int64_t at) { return heads(n + at, n[5] & 2); };
    const Backward run{sizes(n), of(7), of(12), of(17), of(22), (const float*)n[27],
                               of(28), of(33), of(38), of(43)};
    const int64_t threads = run.threads(), made_size = run.made_size();
    const bool plenty = run.heads % threads == 0 || run.heads >= 4 * threads;
    const int64_t parts = plenty ? 1 : least(run.key_blocks(), threads);
    Workspace shared;
    float* made = parts > 1 ? aligned(shared.of(run.heads * parts * made_size + LANES)) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        thread_local Workspace kept;
        Workspace own;
        const int64_t size = run.workspace_size() + (parts > 1 ? 0 : made_size);
        float* mine = aligned((size > KEPT ? own : kept).of(size));
        float* alone = mine;
        auto ws = run.divide(mine + (parts > 1 ? 0 : made_size));
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < run.heads * parts; ++task) {
            float* to = made ? made + task * made_size : alone;
            run.run(task / parts, task % parts, parts, to, ws);
            if (!made) run.collect(task, to, 1, 0);
        }
        if (made) {
#pragma omp for schedule(static)
            for (int64_t which = 0; which < run.heads; ++which)
                run.collect(which, made + which * parts * made_size, parts, made_size);
        }
    }
}

}  // namespace attention
#pragma GCC pop_options

// n: 0 and the arguments of forward, or 1 and those of backward
static void sidefx_attention(const int64_t* n) {
    n[0] ? attention::backward(n + 1) : attention::forward(n + 1);
}

// attend(...): addresses and sizes
static PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
    int64_t n[49];
    for (Py_ssize_t i = 0; i < count && i < 49; ++i) n[i] = PyLong_AsLongLong(given[i]);
    if (PyErr_Occurred()) return nullptr;
    if (count < 1 || count != (n[0] ? 49 : 29)) {
        PyErr_SetString(PyExc_TypeError, "attend takes 29 numbers, or 49");
        return nullptr;
    }
    sidefx_attention(n);
    Py_RETURN_NONE;
}

// function(): sidefx_attention itself, for generated code
static PyObject* function(PyObject*, PyObject*) {
    return PyCapsule_New((void*)&sidefx_attention, "sidefx_attention", nullptr);
}
""".replace("@REGISTERS@", REGISTERS)
