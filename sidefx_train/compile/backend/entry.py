"""What stands between Python and the function that calls a graph's kernels: the same source for every graph.

It is a unit of its own, so that the caller does without Python's headers, and is compiled before the caller is known.
"""

from sidefx_train.compile.native import TABLE

ENTRY = r"""
#include <exception>

struct AtenTensorOpaque;
typedef AtenTensorOpaque* AtenTensorHandle;
@TABLE@
struct SidefxFailure {  // as caller.py has it
    char text[256];
};

void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*);
extern "C" {
extern const int64_t sidefx_outputs;
extern const SidefxKernels* sidefx_kernels __attribute__((weak));  // in callers that use it
}

struct SidefxHandles {
    AtenTensorHandle* at;
    explicit SidefxHandles(Py_ssize_t count) : at(new AtenTensorHandle[count]()) {}
    SidefxHandles(const SidefxHandles&) = delete;
    ~SidefxHandles() { delete[] at; }
};

// call(capsules of inputs) -> capsules of outputs
static PyObject* sidefx_call(PyObject*, PyObject* given) {
    const Py_ssize_t count = PyList_GET_SIZE(given);
    SidefxHandles inputs(count), made(sidefx_outputs);
    AtenTensorHandle* outputs = made.at;
    for (Py_ssize_t i = 0; i < count; ++i)
        inputs.at[i] = reinterpret_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(given, i), nullptr));
    try {
        inductor_entry_impl(inputs.at, outputs);
    } catch (const SidefxFailure& failure) {
        PyErr_SetString(PyExc_RuntimeError, failure.text);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "an error without a name in compiled code");
    }
    if (PyErr_Occurred()) return nullptr;
    PyObject* result = PyList_New(sidefx_outputs);
    for (Py_ssize_t i = 0; result && i < sidefx_outputs; ++i) {
        PyObject* item = outputs[i] ? PyCapsule_New(reinterpret_cast<void*>(outputs[i]), nullptr, nullptr)
                                    : Py_NewRef(Py_None);
        PyList_SET_ITEM(result, i, item);
    }
    return result;
}

static PyObject* sidefx_bind(PyObject*, PyObject* table) {
    sidefx_kernels = (const SidefxKernels*)PyCapsule_GetPointer(table, "sidefx_kernels");
    if (!sidefx_kernels) return nullptr;
    Py_RETURN_NONE;
}

static PyMethodDef sidefx_methods[] = {
    {"call", sidefx_call, METH_O, nullptr},
    {"bind", sidefx_bind, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
static struct PyModuleDef sidefx_module = {PyModuleDef_HEAD_INIT, "sidefx_graph", nullptr, -1, sidefx_methods};

PyMODINIT_FUNC PyInit_sidefx_graph(void) {
    if (&sidefx_kernels == nullptr) sidefx_methods[1] = sidefx_methods[2];  // it calls none: nothing to bind
    return PyModule_Create(&sidefx_module);
}
""".replace("@TABLE@", TABLE)

OUTPUTS = """
extern "C" {
extern const int64_t sidefx_outputs = @OUTPUTS@;
}
"""
"""Behind a caller: how many tensors it returns."""

KERNELS = (
    TABLE
    + """
extern "C" {
const SidefxKernels* sidefx_kernels = nullptr;  // of the native module
}

static AOTITorchError sidefx_call_product(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,
                                          AtenTensorHandle* bias, int64_t how, int at = 0) {
    void *to, *left, *right, *added = nullptr;
    int64_t *left_size, *left_stride, *right_size, *right_stride;
    aoti_torch_get_data_ptr(out, &to);
    aoti_torch_get_data_ptr(a, &left);
    aoti_torch_get_data_ptr(b, &right);
    if (bias) aoti_torch_get_data_ptr(*bias, &added);
    aoti_torch_get_sizes(a, &left_size);
    aoti_torch_get_strides(a, &left_stride);
    aoti_torch_get_sizes(b, &right_size);
    aoti_torch_get_strides(b, &right_stride);
    const int64_t count = at ? left_size[0] : 1;  // the matrices of a batch come first
    sidefx_kernels->product(left, left_stride[at], left_stride[at + 1], right, right_stride[at], right_stride[at + 1],
                            added, to, left_size[at], right_size[at + 1], left_size[at + 1], how, count,
                            at ? left_stride[0] : 0, at ? right_stride[0] : 0);
    return AOTI_TORCH_SUCCESS;
}
#define SIDEFX_PRODUCT(NAME, HOW)                                                                       \
    static AOTITorchError NAME(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b,            \
                               AtenTensorHandle* bias = nullptr) {                                      \
        return sidefx_call_product(out, a, b, bias, HOW);                                               \
    }
#define SIDEFX_PRODUCTS(NAME, HOW)                                                                      \
    static AOTITorchError NAME(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b) {          \
        return sidefx_call_product(out, a, b, nullptr, HOW, 1);                                         \
    }
SIDEFX_PRODUCT(@KERNEL@product, 0)
SIDEFX_PRODUCT(@KERNEL@product_relu, 1)
SIDEFX_PRODUCTS(@KERNEL@products, 0)
SIDEFX_PRODUCT(@KERNEL@product_narrow, 2)
SIDEFX_PRODUCT(@KERNEL@product_relu_narrow, 3)
SIDEFX_PRODUCTS(@KERNEL@products_narrow, 2)

static AOTITorchError @KERNEL@sum_rows(AtenTensorHandle out, AtenTensorHandle index, AtenTensorHandle values) {
    void *to, *places, *from;
    int64_t *size, *values_size;
    int32_t type;
    aoti_torch_get_data_ptr(out, &to);
    aoti_torch_get_data_ptr(index, &places);
    aoti_torch_get_data_ptr(values, &from);
    aoti_torch_get_sizes(out, &size);
    aoti_torch_get_sizes(values, &values_size);
    aoti_torch_get_dtype(values, &type);
    const int64_t wide = type == aoti_torch_dtype_float64();
    return sidefx_kernels->sum_rows((const int64_t*)places, from, to, values_size[0], size[1], size[0], wide);
}
"""
)
"""In front of a caller that calls the native module's kernels."""

DISPATCH = """
static uint64_t sidefx_tensor(AtenTensorHandle tensor) {  // the dispatcher takes the handle
    AtenTensorHandle given = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &given));
    return reinterpret_cast<uint64_t>(given);
}
static uint64_t sidefx_optional(AtenTensorHandle tensor) {  // and what is optional in memory of its own
    return reinterpret_cast<uint64_t>(new uint64_t(sidefx_tensor(tensor)));
}
static void @DISPATCH@(const char* name, const char* overload, uint64_t* stack) {
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher(name, overload, stack));
}
"""
"""In front of a caller that calls operators of ours."""
