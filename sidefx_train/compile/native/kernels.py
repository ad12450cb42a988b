"""The table of the native module's kernels, which generated code is given the address of."""

from sidefx_train.compile.native import products, rows

TABLE = """
struct SidefxKernels {
    void (*product)(const void*, int64_t, int64_t, const void*, int64_t, int64_t, const void*, void*, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int64_t, int64_t);
    int (*sum_rows)(const int64_t*, const void*, void*, int64_t, int64_t, int64_t, int64_t);
};
"""

SOURCE = (
    products.SOURCE
    + rows.SOURCE
    + TABLE
    + """
// kernels(): the table
static PyObject* kernels(PyObject*, PyObject*) {
    static const SidefxKernels table{sidefx_product_of, sidefx_sum_rows};
    return PyCapsule_New((void*)&table, "sidefx_kernels", nullptr);
}
"""
)
