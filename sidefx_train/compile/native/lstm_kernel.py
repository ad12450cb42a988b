"""C++ of the native module: an LSTM layer in one direction, all its time steps, and its derivative.

Rows of the batch are independent: each thread runs some of them through all time steps without synchronization. The
packed weights interleave the four gates of as many units as a vector has lanes, so that one tile of a product contains
all inputs of a cell's next state. For the input, its gradient and those of the weights, many steps are one product.
"""

from sidefx_train.compile.native.simd_registers import REGISTERS

SOURCE = r"""
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
@REGISTERS@
#if defined(__AVX512F__)
#define SIDEFX_TILE 6
#elif defined(__AVX__)
#define SIDEFX_TILE 3
#else
#define SIDEFX_TILE 2
#endif

namespace lstm {

using namespace registers;

constexpr int64_t TILE = SIDEFX_TILE, PANEL = 4 * LANES;  // rows and columns of a tile
constexpr int64_t BLOCK = 128;  // rows of a large product processed at a time
constexpr int64_t ALONE = 1500000;  // floating-point operations below which one thread is done before two have begun

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t parts(int64_t size, int64_t of) { return (size + of - 1) / of; }

// --- activations -------------------------------------------------------------------------------------------------

static inline Lanes between(Lanes low, Lanes x, Lanes high) { return smaller(high, larger(low, x)); }

// 1 / (1 + exp(-x)); a power of 2, times a polynomial that fits on [2 ** -0.5, 2 ** 0.5]
static inline Lanes sigmoid(Lanes x) {
    const Lanes y = between(everywhere(-87.0f), -x, everywhere(88.0f));
    const float magic = 12582912.0f;  // its last bit has the value 1, so adding it rounds to an integer
    const Lanes shifted = y * 1.44269504f + magic, whole = shifted - magic;
    const Lanes r = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Lanes power = r * 1.38144626e-3f + 8.36878084e-3f;
    power = power * r + 4.16683927e-2f;
    power = power * r + 0.166665196f;
    power = power * r + 0.49999994f;
    power = power * r + 1.0f;
    power = power * r + 1.0f;
    const Lanes scale = (Lanes)(((Places)shifted << 23) + (127 << 23));
    return 1.0f / (1.0f + power * scale);
}

// a rational approximation
static inline Lanes tangent(Lanes x) {
    x = between(everywhere(-9.0f), x, everywhere(9.0f));
    const Lanes y = x * x;
    Lanes above = y * 1.33520555e-8f + 2.06072618e-5f, below = y * 7.77550781e-7f + 3.28545691e-4f;
    above = above * y + 3.4954811e-3f;
    above = above * y + 0.133809373f;
    above = above * y + 1.0f;
    below = below * y + 2.58765798e-2f;
    below = below * y + 0.467142522f;
    below = below * y + 1.0f;
    return between(everywhere(-1.0f), x * above / below, everywhere(1.0f));
}

// --- products ----------------------------------------------------------------------------------------------------

#define SIDEFX_ALL _Pragma("GCC unroll 8")  // even at a low optimization level

// R rows of V vectors: out[i][j] = start[i][j] + sum over k of a[i][k] * b[k][j], b a packed panel
template <int R, int V>
static inline void tile(const float* a, int64_t a_row, int64_t a_column, const float* b, const float* start,
                        int64_t start_row, float* out, int64_t out_row, int64_t depth) {
    Lanes sum[R][V];
    SIDEFX_ALL for (int i = 0; i < R; ++i)
        SIDEFX_ALL for (int j = 0; j < V; ++j)
            sum[i][j] = start ? (Lanes)*(const Loose*)(start + i * start_row + j * LANES) : Lanes{};
    for (int64_t k = 0; k < depth; ++k) {
        Lanes right[V];
        SIDEFX_ALL for (int j = 0; j < V; ++j) right[j] = *(const Lanes*)(b + k * PANEL + j * LANES);
        SIDEFX_ALL for (int i = 0; i < R; ++i) {
            const Lanes left = everywhere(a[i * a_row + k * a_column]);
            SIDEFX_ALL for (int j = 0; j < V; ++j) sum[i][j] += left * right[j];
        }
    }
    SIDEFX_ALL for (int i = 0; i < R; ++i)
        SIDEFX_ALL for (int j = 0; j < V; ++j) *(Loose*)(out + i * out_row + j * LANES) = sum[i][j];
}

template <int R> struct Rows { static constexpr int count = R; };

template <int V>
__attribute__((noinline)) static void multiply(const float* a, int64_t a_row, int64_t a_column, const float* b,
                                               const float* start, int64_t start_row, float* out, int64_t out_row,
                                               int64_t count, int64_t depth) {
    auto next = [&](auto rows) {
        constexpr int R = decltype(rows)::count;
        tile<R, V>(a, a_row, a_column, b, start, start_row, out, out_row, depth);
        a += R * a_row, out += R * out_row, start = start ? start + R * start_row : nullptr, count -= R;
    };
    while (count > 0) {  // the smaller a tile, the more loads of the panel: 10 are 5 and 5
        switch (TILE > 5 && count == 10 ? 5 : least(count, TILE)) {
            case 1: next(Rows<1>{}); break;
            case 2: next(Rows<2>{}); break;
#if SIDEFX_TILE > 2
            case 3: next(Rows<3>{}); break;
#endif
#if SIDEFX_TILE > 3
            case 4: next(Rows<4>{}); break;
            case 5: next(Rows<5>{}); break;
            case 6: next(Rows<6>{}); break;
#endif
        }
    }
}

static inline int64_t vectors(int64_t width) { return width <= LANES ? 1 : width <= 2 * LANES ? 2 : 4; }

static void multiply_whole(const float* a, int64_t a_row, int64_t a_column, const float* b, const float* start,
                           float* out, int64_t out_row, int64_t width, int64_t count, int64_t depth) {
    switch (vectors(width)) {
        case 1: return multiply<1>(a, a_row, a_column, b, start, out_row, out, out_row, count, depth);
        case 2: return multiply<2>(a, a_row, a_column, b, start, out_row, out, out_row, count, depth);
        default: return multiply<4>(a, a_row, a_column, b, start, out_row, out, out_row, count, depth);
    }
}

// Columns [0, width) of a product, added to the output if requested.
static void multiply_panel(const float* a, int64_t a_row, int64_t a_column, const float* b, float* out, int64_t out_row,
                           int64_t width, int64_t count, int64_t depth, bool more) {
    if (width == vectors(width) * LANES)
        return multiply_whole(a, a_row, a_column, b, more ? out : nullptr, out, out_row, width, count, depth);
    float edge[TILE * PANEL];
    for (int64_t i = 0; i < count; i += TILE) {
        const int64_t rows = count - i < TILE ? count - i : TILE;
        float* target = out + i * out_row;
        for (int64_t r = 0; r < rows && more; ++r)
            for (int64_t j = 0; j < PANEL; ++j) edge[r * PANEL + j] = j < width ? target[r * out_row + j] : 0.0f;
        multiply_whole(a + i * a_row, a_row, a_column, b, more ? edge : nullptr, edge, PANEL, width, rows, depth);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < width; ++j) target[r * out_row + j] = edge[r * PANEL + j];
    }
}

// --- rows and panels ---------------------------------------------------------------------------------------------

// Copies the available numbers, zero-padded.
static inline Lanes part(const float* from, int64_t step, int64_t count) {
    if (step == 1 && count >= LANES) return *(const Loose*)from;
    float held[LANES] = {};
    for (int64_t l = 0; l < LANES && l < count; ++l) held[l] = from[l * step];
    return *(const Loose*)held;
}

static inline void keep_part(float* to, Lanes value, int64_t count) {
    if (count >= LANES) {
        *(Loose*)to = value;
        return;
    }
    for (int64_t l = 0; l < count; ++l) to[l] = value[l];
}

static inline void copy_row(const float* from, int64_t step, int64_t width, float* to) {
    for (int64_t j = 0; j < PANEL; j += LANES) *(Loose*)(to + j) = part(from + j * step, step, width - j);
}

// Transposes the gates of LANES units, grouped by gate, to a panel of depth rows.
static void pack_gates(const float* weight, int64_t depth, int64_t units, int64_t unit, float* to) {
    const int64_t count = least(units - unit, LANES), whole = count == LANES ? depth / LANES * LANES : 0;
    for (int64_t gate = 0; gate < 4; ++gate, to += LANES) {
        const float* from = weight + (gate * units + unit) * depth;
        for (int64_t k = 0; k < whole; k += LANES) transpose(from + k, depth, to + k * PANEL, PANEL);
        for (int64_t k = whole; k < depth; ++k)
            for (int64_t l = 0; l < LANES; ++l) to[k * PANEL + l] = l < count ? from[l * depth + k] : 0.0f;
    }
}

struct Sequence { const float* data; int64_t time, row, unit; };  // strides in elements

struct Sizes {
    int64_t length, rows, inputs, units;
    bool reverse;

    int64_t panels() const { return parts(units, LANES); }
    int64_t padded() const { return panels() * LANES; }
    int64_t gates() const { return panels() * PANEL; }  // numbers of one row
    int64_t time(int64_t step) const { return reverse ? length - 1 - step : step; }
    int64_t threads() const {
        return 8 * length * rows * units * (inputs + units) < ALONE ? 1 : omp_get_max_threads();
    }
};

// --- forward -----------------------------------------------------------------------------------------------------

struct Forward : Sizes {
    Sequence x;
    const float *input_weights, *hidden_weights, *bias, *hidden, *cells;  // packed; initial states may be null
    float *out, *last_hidden, *last_cells, *kept;

    // One step of LANES units of a row, from the inputs of the gates.
    __attribute__((always_inline)) static inline void advance(float* gates, Lanes before, float* cell, float* hidden,
                                                              int64_t count) {
        Lanes* gate = (Lanes*)gates;
        const Lanes in = sigmoid(gate[0]), forget = sigmoid(gate[1]), fresh = tangent(gate[2]), out = sigmoid(gate[3]);
        const Lanes now = forget * before + in * fresh;
        gate[0] = in, gate[1] = forget, gate[2] = fresh, gate[3] = out;
        *(Lanes*)cell = now;
        keep_part(hidden, out * tangent(now), count);
    }

    void run(int64_t first, int64_t end) const {
        const int64_t count = end - first, wide = gates(), most = count < BLOCK ? BLOCK / count : 1;
        Workspace own;
        float* ws = kept ? nullptr : aligned(own.of(count * (most * wide + padded()) + LANES));
        float* state = nullptr;
        for (int64_t begun = 0; begun < length; begun += most) {
            const int64_t stop = least(begun + most, length);
            auto gates_at = [&](int64_t step) {
                return kept ? kept + (time(step) * rows + first) * wide : ws + (step - begun) * count * wide;
            };
            for (int64_t p = 0; p < panels(); ++p)
                for (int64_t step = begun; step < stop; ++step)
                    multiply<4>(x.data + time(step) * x.time + first * x.row, x.row, x.unit,
                                input_weights + p * inputs * PANEL, bias ? bias + p * PANEL : nullptr, 0,
                                gates_at(step) + p * PANEL, wide, count, inputs);
            for (int64_t step = begun; step < stop; ++step) {
                const float* before = step ? out + (time(step - 1) * rows + first) * units
                                           : hidden ? hidden + first * units : nullptr;
                const float* old = state;
                state = kept ? kept + length * rows * wide + (time(step) * rows + first) * padded()
                             : ws + count * most * wide;
                for (int64_t p = 0; p < panels(); ++p) {
                    float* gate = gates_at(step) + p * PANEL;
                    if (before)
                        multiply<4>(before, units, 1, hidden_weights + p * units * PANEL, gate, wide, gate, wide,
                                    count, units);
                    const int64_t unit = p * LANES, left = units - unit;
                    for (int64_t i = 0; i < count; ++i) {
                        const Lanes cell = old ? *(const Lanes*)(old + i * padded() + unit)
                                               : cells ? part(cells + (first + i) * units + unit, 1, left) : Lanes{};
                        advance(gate + i * wide, cell, state + i * padded() + unit,
                                out + (time(step) * rows + first + i) * units + unit, left);
                    }
                }
            }
        }
        const float* shown = out + (time(length - 1) * rows + first) * units;
        for (int64_t i = 0; i < count; ++i)
            for (int64_t j = 0; j < units; ++j) {
                last_hidden[(first + i) * units + j] = shown[i * units + j];
                last_cells[(first + i) * units + j] = state[i * padded() + j];
            }
    }
};

// --- backward ----------------------------------------------------------------------------------------------------

struct Backward : Sizes {
    Sequence x, grad, grad_hidden, grad_cells;  // gradients may be null
    const float *input_weights, *hidden_weights, *hidden, *cells, *out, *kept;  // packed; initial states may be null
    float *dx, *d_input_weights, *d_hidden_weights, *d_biases[2], *d_hidden, *d_cells;  // requested gradients
    float* gradients;  // gradients of the gates, in the order of the weights

    int64_t wide() const { return 4 * units + LANES; }  // no power of two: rows are in different cache sets

    // Gradients of the gates of a row, from those of the step's outputs.
    void descend(int64_t step, int64_t row, float* above, float* state) const {
        const int64_t now = time(step) * rows + row;
        const float* gates_now = kept + now * gates();
        const float* cell_now = kept + length * rows * gates() + now * padded();
        const float* cell_before = step ? cell_now + (time(step - 1) - time(step)) * rows * padded() : nullptr;
        float* to = gradients + now * wide();
        const bool last = step == length - 1;
        for (int64_t unit = 0; unit < units; unit += LANES) {
            const int64_t left = units - unit;
            const Lanes* gate = (const Lanes*)(gates_now + 4 * unit);
            const Lanes in = gate[0], forget = gate[1], fresh = gate[2], out = gate[3];
            const Lanes shown = tangent(*(const Lanes*)(cell_now + unit));
            const Lanes before = cell_before ? *(const Lanes*)(cell_before + unit)
                                             : cells ? part(cells + row * units + unit, 1, left) : Lanes{};
            Lanes dh = last ? of(grad_hidden, row, 0, unit) : *(const Lanes*)(above + unit);
            dh += of(grad, row, time(step), unit);
            Lanes dc = last ? of(grad_cells, row, 0, unit) : *(const Lanes*)(state + unit);
            dc += dh * out * (1.0f - shown * shown);
            keep_part(to + unit, dc * fresh * in * (1.0f - in), left);
            keep_part(to + units + unit, dc * before * forget * (1.0f - forget), left);
            keep_part(to + 2 * units + unit, dc * in * (1.0f - fresh * fresh), left);
            keep_part(to + 3 * units + unit, dh * shown * out * (1.0f - out), left);
            *(Lanes*)(state + unit) = dc * forget;
        }
    }

    Lanes of(const Sequence& given, int64_t row, int64_t at, int64_t unit) const {
        if (!given.data) return Lanes{};
        return part(given.data + at * given.time + row * given.row + unit * given.unit, given.unit, units - unit);
    }

    void run(int64_t first, int64_t end) const {
        const int64_t count = end - first, most = count < BLOCK ? BLOCK / count : 1;
        const int64_t above_row = parts(units, PANEL) * PANEL;
        Workspace own;
        float* above = aligned(own.of(count * (above_row + padded()) + LANES));
        float* state = above + count * above_row;
        for (int64_t stop = length; stop > 0; stop -= most) {
            const int64_t begun = stop < most ? 0 : stop - most;
            for (int64_t step = stop - 1; step >= begun; --step) {
                for (int64_t i = 0; i < count; ++i)
                    descend(step, first + i, above + i * above_row, state + i * padded());
                if (step == 0 && !d_hidden) continue;
                const float* from = gradients + (time(step) * rows + first) * wide();
                for (int64_t column = 0; column < units; column += PANEL)
                    multiply_whole(from, wide(), 1, hidden_weights + column * 4 * units, nullptr, above + column,
                                   above_row, least(units - column, PANEL), count, 4 * units);
            }
            for (int64_t column = 0; dx && column < inputs; column += PANEL)
                for (int64_t step = begun; step < stop; ++step) {
                    const int64_t at = time(step) * rows + first;
                    multiply_panel(gradients + at * wide(), wide(), 1, input_weights + column * 4 * units,
                                   dx + at * inputs + column, inputs, least(inputs - column, PANEL), count, 4 * units,
                                   false);
                }
        }
        for (int64_t i = 0; d_hidden && i < count; ++i)
            for (int64_t j = 0; j < units; ++j) {
                d_hidden[(first + i) * units + j] = above[i * above_row + j];
                d_cells[(first + i) * units + j] = state[i * padded() + j];
            }
    }

    // Rows [first, end) of the gradients of the weights.
    void collect(int64_t first, int64_t end) const {
        Workspace own;
        float* panel = aligned(own.of(BLOCK * PANEL + LANES));
        for (int64_t at = 0; at < length * rows; at += BLOCK) {
            const int64_t depth = least(BLOCK, length * rows - at);
            const float* left = gradients + at * wide() + first;
            auto add = [&](auto row_at, int64_t unit, int64_t width, float* to) {
                for (int64_t column = 0; column < width; column += PANEL) {
                    for (int64_t k = 0; k < depth; ++k)
                        copy_row(row_at((at + k) / rows, (at + k) % rows) + column * unit, unit, width - column,
                                 panel + k * PANEL);
                    multiply_panel(left, 1, wide(), panel, to + first * width + column, width,
                                   least(width - column, PANEL), end - first, depth, at > 0);
                }
            };
            add([&](int64_t t, int64_t row) { return x.data + t * x.time + row * x.row; }, x.unit, inputs,
                d_input_weights);
            add([&](int64_t t, int64_t row) {
                const int64_t before = reverse ? t + 1 : t - 1;
                return before >= 0 && before < length ? out + (before * rows + row) * units : hidden + row * units;
            }, 1, units, d_hidden_weights);
            for (int64_t j = first; j < end && d_biases[0]; j += LANES) {
                Lanes sum = at ? part(d_biases[0] + j, 1, end - j) : Lanes{};
                for (int64_t k = 0; k < depth; ++k) sum += part(left + k * wide() + j - first, 1, end - j);
                for (float* bias : d_biases) keep_part(bias + j, sum, end - j);
            }
        }
    }
};

static Sizes sizes(const int64_t* n) { return {n[0], n[1], n[2], n[3], n[4] != 0}; }

static Sequence sequence(const int64_t* n) { return {(const float*)n[0], n[1], n[2], n[3]}; }

// n: sizes, x with its strides, weights, biases, initial states, out, last states, saved values (may be 0)
static void forward(const int64_t* n) {
    const Sizes of = sizes(n);
    const auto *w_ih = (const float*)n[9], *w_hh = (const float*)n[10];
    const auto *b_ih = (const float*)n[11], *b_hh = (const float*)n[12];
    const int64_t threads = of.threads(), panels = of.panels(), workers = least(threads, of.rows);
    const int64_t input_panel = of.inputs * PANEL, hidden_panel = of.units * PANEL;
    Workspace ws;
    float* packed = aligned(ws.of(panels * (input_panel + hidden_panel + PANEL) + LANES));
    float *packed_hidden = packed + panels * input_panel, *bias = packed_hidden + panels * hidden_panel;
    const Forward run{of, sequence(n + 5), packed, packed_hidden, b_ih ? bias : nullptr, (const float*)n[13],
                      (const float*)n[14], (float*)n[15], (float*)n[16], (float*)n[17], (float*)n[18]};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; ++p) {
            const int64_t unit = p * LANES, left = of.units - unit;
            pack_gates(w_ih, of.inputs, of.units, unit, packed + p * input_panel);
            pack_gates(w_hh, of.units, of.units, unit, packed_hidden + p * hidden_panel);
            for (int64_t at = unit, gate = 0; b_ih && gate < 4; ++gate, at += of.units)
                *(Lanes*)(bias + p * PANEL + gate * LANES) = part(b_ih + at, 1, left) + part(b_hh + at, 1, left);
        }
#pragma omp for schedule(static)
        for (int64_t w = 0; w < workers; ++w) run.run(of.rows * w / workers, of.rows * (w + 1) / workers);
    }
}

// n: sizes, x, gradients of out and of the last states, each with strides, weights, initial states, out, values saved
// by forward, then the requested gradients: of x, weights, biases (one gradient twice), initial states
static void backward(const int64_t* n) {
    const Sizes of = sizes(n);
    const float* weights[] = {(const float*)n[21], (const float*)n[22]};
    const int64_t widths[] = {n[27] ? of.inputs : 0, of.units};  // if dx is not requested, its weights are not used
    const int64_t threads = of.threads(), workers = least(threads, of.rows), deep = 4 * of.units;
    const int64_t panels[] = {parts(widths[0], PANEL), parts(widths[1], PANEL)};
    const int64_t wide = deep + LANES;
    const float* hidden = (const float*)n[23];
    Workspace ws, zeros;
    float* packed = aligned(ws.of((panels[0] + panels[1]) * deep * PANEL + of.length * of.rows * wide + LANES));
    float *packed_hidden = packed + panels[0] * deep * PANEL, *gradients = packed_hidden + panels[1] * deep * PANEL;
    if (!hidden) {
        float* made = zeros.of(of.rows * of.units);
        for (int64_t i = 0; i < of.rows * of.units; ++i) made[i] = 0.0f;
        hidden = made;
    }
    const Backward run{of, sequence(n + 5), sequence(n + 9), sequence(n + 13), sequence(n + 17), packed, packed_hidden,
                       hidden, (const float*)n[24], (const float*)n[25], (const float*)n[26], (float*)n[27],
                       (float*)n[28], (float*)n[29], {(float*)n[30], (float*)n[31]}, (float*)n[32], (float*)n[33],
                       gradients};
    const int64_t chunk = parts(parts(deep, threads), TILE) * TILE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < deep; ++k)
            for (int side = 0; side < 2; ++side)
                for (int64_t p = 0; p < panels[side]; ++p)
                    copy_row(weights[side] + k * widths[side] + p * PANEL, 1, widths[side] - p * PANEL,
                             (side ? packed_hidden : packed) + (p * deep + k) * PANEL);
#pragma omp for schedule(static)
        for (int64_t w = 0; w < workers; ++w) run.run(of.rows * w / workers, of.rows * (w + 1) / workers);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < threads; ++t)
            if (n[28] && t * chunk < deep) run.collect(t * chunk, least((t + 1) * chunk, deep));
    }
}

}  // namespace lstm
#pragma GCC pop_options

// n: 0 and the arguments of forward, or 1 and those of backward
static void sidefx_lstm(const int64_t* n) { n[0] ? lstm::backward(n + 1) : lstm::forward(n + 1); }

// layer(...): addresses and sizes
static PyObject* layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
    int64_t n[35];
    for (Py_ssize_t i = 0; i < count && i < 35; ++i) n[i] = PyLong_AsLongLong(given[i]);
    if (PyErr_Occurred()) return nullptr;
    if (count < 1 || count != (n[0] ? 35 : 20)) {
        PyErr_SetString(PyExc_TypeError, "layer takes 20 numbers, or 35");
        return nullptr;
    }
    sidefx_lstm(n);
    Py_RETURN_NONE;
}

// function(): sidefx_lstm itself, for generated code
static PyObject* function(PyObject*, PyObject*) {
    return PyCapsule_New((void*)&sidefx_lstm, "sidefx_lstm", nullptr);
}
""".replace("@REGISTERS@", REGISTERS)
