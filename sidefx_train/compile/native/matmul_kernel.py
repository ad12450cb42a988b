"""C++ of the native module: products of small matrices, in float32 or, with sums in float32, in bfloat16.

One tile of the result stays in registers while a row of the left matrix is multiplied with a panel of the right one;
operands not stored the way a tile reads them are first copied to a panel. Libraries divide a product into blocks for
caches and threads, which costs more than small products themselves.
"""

from sidefx_train.compile.native.simd_registers import REGISTERS

NARROW = 2
"""Flag of the kernel's arguments: the numbers are bfloat16."""

SOURCE = r"""
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
@REGISTERS@
#if defined(__AVX512F__)
#define SIDEFX_ROWS 6
#define SIDEFX_VECTORS 4
#elif defined(__AVX__)
#define SIDEFX_ROWS 6
#define SIDEFX_VECTORS 2
#else
#define SIDEFX_ROWS 4
#define SIDEFX_VECTORS 2
#endif

namespace products {

using namespace registers;

constexpr int64_t ROWS = SIDEFX_ROWS, VECTORS = SIDEFX_VECTORS, PANEL = LANES * VECTORS;
constexpr int64_t ALONE = 1500000;  // floating-point operations below which one thread is done before two have begun

struct Matrix { const float* data; int64_t row, column; };  // strides in elements

// rows [0, R) of V vectors of one panel: out[i][j] = bias[j] + sum over k of a[i][k] * b[k][j], with an optional
// relu
template <int R, int V>
static inline void tile(Matrix a, const float* b, int64_t b_row, const float* bias, float* out, int64_t out_row,
                        int64_t depth, bool relu) {
    Lanes sum[R][V];
    for (int j = 0; j < V; ++j) {
        Lanes start = bias ? (Lanes)*(const Loose*)(bias + j * LANES) : Lanes{};
        for (int i = 0; i < R; ++i) sum[i][j] = start;
    }
    for (int64_t k = 0; k < depth; ++k) {
        Lanes right[V];
        for (int j = 0; j < V; ++j) right[j] = *(const Loose*)(b + k * b_row + j * LANES);
        for (int i = 0; i < R; ++i) {
            const Lanes left = everywhere(a.data[i * a.row + k * a.column]);
            for (int j = 0; j < V; ++j) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j) {
            const Lanes found = sum[i][j];
            *(Loose*)(out + i * out_row + j * LANES) = relu ? (found < 0.0f ? Lanes{} : found) : found;
        }
}

template <int V>
static inline void rows(Matrix a, const float* b, int64_t b_row, const float* bias, float* out, int64_t out_row,
                        int64_t depth, int64_t count, bool relu) {
    switch (count) {
        case 1: tile<1, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
        case 2: tile<2, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
        case 3: tile<3, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
        case 4: tile<4, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
#if SIDEFX_ROWS == 6
        case 5: tile<5, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
        case 6: tile<6, V>(a, b, b_row, bias, out, out_row, depth, relu); break;
#endif
    }
}

// Columns [0, width) of b as a panel of PANEL columns, zero-padded.
static void fill_panel(Matrix b, int64_t depth, int64_t width, float* panel) {
    int64_t transposed = 0;
    if (b.row == 1 && width % LANES == 0) {
        transposed = depth / LANES * LANES;
        for (int64_t j = 0; j < width; j += LANES)
            for (int64_t k = 0; k < transposed; k += LANES)
                transpose(b.data + j * b.column + k, b.column, panel + k * PANEL + j, PANEL);
    }
    for (int64_t k = transposed; k < depth; ++k) {
        for (int64_t j = 0; j < width; ++j) panel[k * PANEL + j] = b.data[k * b.row + j * b.column];
        for (int64_t j = width; j < PANEL; ++j) panel[k * PANEL + j] = 0.0f;
    }
}

static void panel_of_rows(Matrix a, Matrix b, const float* bias, float* out, int64_t columns, int64_t depth,
                          int64_t first, int64_t last, int64_t column, bool relu) {
    thread_local Workspace copied;
    const int64_t width = columns - column < PANEL ? columns - column : PANEL;
    const Matrix mine{b.data + column * b.column, b.row, b.column};
    const float* right = mine.data;
    int64_t right_row = b.row;
    const int64_t full = width <= LANES ? LANES : width <= PANEL / 2 ? PANEL / 2 : PANEL;
    if (b.column != 1 || width < full) {
        float* panel = copied.of(depth * PANEL);
        fill_panel(mine, depth, width, panel);
        right = panel;
        right_row = PANEL;
    }
    float edge_bias[PANEL] = {}, edge[ROWS * PANEL];
    const float* added = bias ? bias + column : nullptr;
    if (bias && width < full) {
        for (int64_t j = 0; j < width; ++j) edge_bias[j] = bias[column + j];
        added = edge_bias;
    }
    for (int64_t i = first; i < last; i += ROWS) {
        const int64_t count = last - i < ROWS ? last - i : ROWS;
        const Matrix left{a.data + i * a.row, a.row, a.column};
        float* target = out + i * columns + column;
        float* to = width == full ? target : edge;
        const int64_t to_row = width == full ? columns : PANEL;
        if (full == LANES && count == ROWS)
            tile<ROWS, 1>(left, right, right_row, added, to, to_row, depth, relu);
        else if (full == LANES)
            for (int64_t r = 0; r < count; ++r)
                tile<1, 1>({left.data + r * a.row, a.row, a.column}, right, right_row, added, to + r * to_row, to_row,
                           depth, relu);
        else if (full < PANEL)
            rows<VECTORS / 2>(left, right, right_row, added, to, to_row, depth, count, relu);
        else
            rows<VECTORS>(left, right, right_row, added, to, to_row, depth, count, relu);
        if (width == full) continue;
        for (int64_t r = 0; r < count; ++r)
            for (int64_t j = 0; j < width; ++j) target[r * columns + j] = edge[r * PANEL + j];
    }
}

}  // namespace products

// out = a b + bias, with an optional relu; out is contiguous by rows, a is height x depth and b
// depth x columns; count such products, whose matrices are a_next and b_next elements apart
static void sidefx_product(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                           int64_t b_column, const float* bias, float* out, int64_t height, int64_t columns,
                           int64_t depth, int64_t relu, int64_t count, int64_t a_next, int64_t b_next) {
    using namespace products;
    const Matrix left{a, a_row, a_column}, right{b, b_row, b_column};
    const int64_t panels = (columns + PANEL - 1) / PANEL;
    const int threads = 2 * count * height * columns * depth < ALONE ? 1 : omp_get_max_threads();
    if (count > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t task = 0; task < count * panels; ++task) {
            const int64_t at = task / panels;
            const Matrix mine{a + at * a_next, a_row, a_column}, other{b + at * b_next, b_row, b_column};
            panel_of_rows(mine, other, bias, out + at * height * columns, columns, depth, 0, height,
                          task % panels * PANEL, relu);
        }
        return;
    }
    if (threads == 1) {
        for (int64_t p = 0; p < panels; ++p)
            panel_of_rows(left, right, bias, out, columns, depth, 0, height, p * PANEL, relu);
        return;
    }
    const int64_t parts = panels % threads == 0 ? 1 : threads;
    const int64_t share = ((height + parts - 1) / parts + ROWS - 1) / ROWS * ROWS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < panels * parts; ++task) {
        const int64_t first = task % parts * share, end = first + share < height ? first + share : height;
        if (first < end) panel_of_rows(left, right, bias, out, columns, depth, first, end, task / parts * PANEL, relu);
    }
}

namespace products {

constexpr int64_t KEPT = 1 << 20;  // numbers up to which a thread keeps its workspace

static inline float wide(uint16_t number) { return __builtin_bit_cast(float, (uint32_t)number << 16); }

static inline uint16_t narrow(float number) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, number);
    return number != number ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Copies a matrix to float32, with the same contiguous dimension.
static Matrix widened(const uint16_t* from, int64_t row, int64_t column, int64_t height, int64_t width, float* to) {
    if (column == 1) {
        for (int64_t i = 0; i < height; ++i)
            for (int64_t j = 0; j < width; ++j) to[i * width + j] = wide(from[i * row + j]);
        return {to, width, 1};
    }
    if (row == 1) {
        for (int64_t j = 0; j < width; ++j)
            for (int64_t i = 0; i < height; ++i) to[j * height + i] = wide(from[j * column + i]);
        return {to, 1, height};
    }
    for (int64_t i = 0; i < height; ++i)
        for (int64_t j = 0; j < width; ++j) to[i * width + j] = wide(from[i * row + j * column]);
    return {to, width, 1};
}

}  // namespace products

// The same in bfloat16, computed in float32: results are rounded once.
static void sidefx_product_narrow(const uint16_t* a, int64_t a_row, int64_t a_column, const uint16_t* b, int64_t b_row,
                                  int64_t b_column, const uint16_t* bias, uint16_t* out, int64_t height,
                                  int64_t columns, int64_t depth, int64_t relu, int64_t count, int64_t a_next,
                                  int64_t b_next) {
    using namespace products;
    thread_local Workspace kept;
    Workspace own;
    const int64_t left_size = height * depth, right_size = depth * columns, made_size = height * columns;
    const int64_t wanted = count * (left_size + right_size + made_size) + columns;
    float* left = (wanted > KEPT ? own : kept).of(wanted);
    float *right = left + count * left_size, *made = right + count * right_size, *added = made + count * made_size;
    Matrix first{}, second{};
#pragma omp parallel for schedule(static) if (count > 1 && wanted > 65536)
    for (int64_t at = 0; at < count; ++at) {
        const Matrix one = widened(a + at * a_next, a_row, a_column, height, depth, left + at * left_size);
        const Matrix two = widened(b + at * b_next, b_row, b_column, depth, columns, right + at * right_size);
        if (at == 0) first = one, second = two;
    }
    for (int64_t j = 0; bias && j < columns; ++j) added[j] = wide(bias[j]);
    sidefx_product(left, first.row, first.column, right, second.row, second.column, bias ? added : nullptr, made,
                   height, columns, depth, relu, count, left_size, right_size);
    for (int64_t i = 0; i < count * made_size; ++i) out[i] = narrow(made[i]);
}
#pragma GCC pop_options

// what generated code calls: how is 1 for a relu, plus 2 for bfloat16
static void sidefx_product_of(const void* a, int64_t a_row, int64_t a_column, const void* b, int64_t b_row,
                              int64_t b_column, const void* bias, void* out, int64_t height, int64_t columns,
                              int64_t depth, int64_t how, int64_t count, int64_t a_next, int64_t b_next) {
    if (how & 2)
        sidefx_product_narrow((const uint16_t*)a, a_row, a_column, (const uint16_t*)b, b_row, b_column,
                              (const uint16_t*)bias, (uint16_t*)out, height, columns, depth, how & 1, count, a_next,
                              b_next);
    else
        sidefx_product((const float*)a, a_row, a_column, (const float*)b, b_row, b_column, (const float*)bias,
                       (float*)out, height, columns, depth, how, count, a_next, b_next);
}

// product(a, a_row, a_column, b, b_row, b_column, bias, out, height, columns, depth, how, count, a_next, b_next):
// addresses and sizes
static PyObject* product(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 15) { PyErr_SetString(PyExc_TypeError, "product takes 15 numbers"); return nullptr; }
    int64_t n[15];
    for (int i = 0; i < 15; ++i) n[i] = PyLong_AsLongLong(given[i]);
    if (PyErr_Occurred()) return nullptr;
    sidefx_product_of((const void*)n[0], n[1], n[2], (const void*)n[3], n[4], n[5], (const void*)n[6], (void*)n[7],
                      n[8], n[9], n[10], n[11], n[12], n[13], n[14]);
    Py_RETURN_NONE;
}

// function(): sidefx_product_of itself, for generated code
static PyObject* function(PyObject*, PyObject*) {
    return PyCapsule_New((void*)&sidefx_product_of, "sidefx_product", nullptr);
}
""".replace("@REGISTERS@", REGISTERS)
