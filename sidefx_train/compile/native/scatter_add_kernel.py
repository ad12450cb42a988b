"""C++ of the native module: scatter-add of rows (the gradient of an embedding, messages to the nodes of a graph).

Generated loops process the added rows with several threads at once, and add each number atomically. Here a thread has
columns of its own, and rows of the result if there are few columns: vectors are added, in eager's order.
"""

SOURCE = r"""
namespace rows {

constexpr int64_t ALONE = 32768;  // numbers below which a second thread is not worth it
constexpr int64_t LINE = 16;  // numbers per cache line
constexpr int64_t LEFT_OUT = INT64_MIN;

}  // namespace rows

// out[index[i]] is the sum of the rows values[i], in order; negative indices count from the end, the smallest
// integer skips a row. Returns 1, and writes nothing, if an index is out of range.
static int sidefx_sum_rows(const int64_t* index, const float* values, float* out, int64_t count, int64_t columns,
                           int64_t height) {
    using namespace rows;
    int wrong = 0;
    for (int64_t i = 0; i < count; ++i)
        wrong |= index[i] != LEFT_OUT && (index[i] < -height || index[i] >= height);
    if (wrong) return 1;
    const int64_t threads = (count + height) * columns < ALONE ? 1 : omp_get_max_threads();
    int64_t strips = columns / LINE < threads ? columns / LINE : threads;
    strips = strips < 1 ? 1 : strips;
    const int64_t bands = threads / strips;
    const int64_t width = ((columns + strips - 1) / strips + LINE - 1) / LINE * LINE;
    const int64_t band = (height + bands - 1) / bands, cleared = (height + threads - 1) / threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < threads; ++t) {
            const int64_t first = t * cleared, end = first + cleared < height ? first + cleared : height;
            if (first < end) __builtin_memset(out + first * columns, 0, (end - first) * columns * sizeof(float));
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < strips * bands; ++t) {
            const int64_t left = t % strips * width, right = left + width < columns ? left + width : columns;
            const int64_t low = t / strips * band, high = low + band < height ? low + band : height;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t row = index[i] < 0 && index[i] != LEFT_OUT ? index[i] + height : index[i];
                if (row < low || row >= high) continue;
                float* to = out + row * columns;
                const float* from = values + i * columns;
#pragma GCC ivdep
                for (int64_t j = left; j < right; ++j) to[j] += from[j];
            }
        }
    }
    return 0;
}

// sum_rows(index, values, out, count, columns, height): addresses and sizes; false if an index is out of range
static PyObject* sum_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 6) { PyErr_SetString(PyExc_TypeError, "sum_rows takes 6 numbers"); return nullptr; }
    int64_t n[6];
    for (int i = 0; i < 6; ++i) n[i] = PyLong_AsLongLong(given[i]);
    if (PyErr_Occurred()) return nullptr;
    const int wrong = sidefx_sum_rows((const int64_t*)n[0], (const float*)n[1], (float*)n[2], n[3], n[4], n[5]);
    return PyBool_FromLong(!wrong);
}

// function(): sidefx_sum_rows itself, for generated code
static PyObject* function(PyObject*, PyObject*) {
    return PyCapsule_New((void*)&sidefx_sum_rows, "sidefx_sum_rows", nullptr);
}
"""
