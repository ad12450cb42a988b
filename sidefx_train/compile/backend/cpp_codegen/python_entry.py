"""Python entry point: source between Python and the wrapper, the same for every graph.

It is a separate unit, so that the wrapper needs no Python headers, and is compiled before the wrapper is known.
"""

from sidefx_train import torch_compat as compat
from sidefx_train.compile.backend.cpp_codegen.wrapper_prelude import FAILURE

_TYPES = """
typedef void (*SidefxProduct)(const void*, int64_t, int64_t, const void*, int64_t, int64_t, const void*, void*,
                              int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
typedef int (*SidefxSumRows)(const int64_t*, const float*, float*, int64_t, int64_t, int64_t);
typedef void (*SidefxLstm)(const int64_t*);
typedef void (*SidefxAttention)(const int64_t*);
"""
"""Functions of the native modules."""

ENTRY = r"""
#include <exception>

struct AtenTensorOpaque;
typedef AtenTensorOpaque* AtenTensorHandle;
@TYPES@
@FAILURE@
void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*);
extern "C" {
extern const int64_t sidefx_outputs;
extern SidefxProduct sidefx_product __attribute__((weak));  // in wrappers that use it
extern SidefxSumRows sidefx_sum_rows __attribute__((weak));
extern SidefxLstm sidefx_lstm __attribute__((weak));
extern SidefxAttention sidefx_attention __attribute__((weak));
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

static PyObject* sidefx_bind_product(PyObject*, PyObject* function) {
    sidefx_product = (SidefxProduct)PyCapsule_GetPointer(function, "sidefx_product");
    if (!sidefx_product) return nullptr;
    Py_RETURN_NONE;
}

static PyObject* sidefx_bind_sum_rows(PyObject*, PyObject* function) {
    sidefx_sum_rows = (SidefxSumRows)PyCapsule_GetPointer(function, "sidefx_sum_rows");
    if (!sidefx_sum_rows) return nullptr;
    Py_RETURN_NONE;
}

static PyObject* sidefx_bind_lstm(PyObject*, PyObject* function) {
    sidefx_lstm = (SidefxLstm)PyCapsule_GetPointer(function, "sidefx_lstm");
    if (!sidefx_lstm) return nullptr;
    Py_RETURN_NONE;
}

static PyObject* sidefx_bind_attention(PyObject*, PyObject* function) {
    sidefx_attention = (SidefxAttention)PyCapsule_GetPointer(function, "sidefx_attention");
    if (!sidefx_attention) return nullptr;
    Py_RETURN_NONE;
}

static PyMethodDef sidefx_methods[6] = {{"call", sidefx_call, METH_O, nullptr}};
static struct PyModuleDef sidefx_module = {PyModuleDef_HEAD_INIT, "sidefx_graph", nullptr, -1, sidefx_methods};

PyMODINIT_FUNC PyInit_sidefx_graph(void) {
    PyMethodDef* next = sidefx_methods + 1;
    if (&sidefx_product != nullptr) *next++ = {"bind_product", sidefx_bind_product, METH_O, nullptr};
    if (&sidefx_sum_rows != nullptr) *next++ = {"bind_sum_rows", sidefx_bind_sum_rows, METH_O, nullptr};
    if (&sidefx_lstm != nullptr) *next++ = {"bind_lstm", sidefx_bind_lstm, METH_O, nullptr};
    if (&sidefx_attention != nullptr) *next++ = {"bind_attention", sidefx_bind_attention, METH_O, nullptr};
    return PyModule_Create(&sidefx_module);
}
""".replace("@TYPES@", _TYPES).replace("@FAILURE@", FAILURE)

OUTPUTS = """
extern "C" {
extern const int64_t sidefx_outputs = @OUTPUTS@;
}
"""
"""Follows a wrapper: its number of outputs."""

_PRODUCT = """
extern "C" {
SidefxProduct sidefx_product = nullptr;  // function of the native module
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
    const int64_t count = at ? left_size[0] : 1;  // the batch dimension comes first
    sidefx_product(left, left_stride[at], left_stride[at + 1], right, right_stride[at], right_stride[at + 1], added, to,
                   left_size[at], right_size[at + 1], left_size[at + 1], how, count, at ? left_stride[0] : 0,
                   at ? right_stride[0] : 0);
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
"""

_SUM_ROWS = """
extern "C" {
SidefxSumRows sidefx_sum_rows = nullptr;  // function of the native module
}

static AOTITorchError @KERNEL@sum_rows(AtenTensorHandle out, AtenTensorHandle index, AtenTensorHandle values) {
    void *to, *places, *from;
    int64_t *size, *values_size;
    aoti_torch_get_data_ptr(out, &to);
    aoti_torch_get_data_ptr(index, &places);
    aoti_torch_get_data_ptr(values, &from);
    aoti_torch_get_sizes(out, &size);
    aoti_torch_get_sizes(values, &values_size);
    return sidefx_sum_rows((const int64_t*)places, (const float*)from, (float*)to, values_size[0], size[1], size[0]);
}
"""

_WORDS = """
struct SidefxWords {  // arguments of a module's function
    int64_t at[49];
    int count = 0;
    void put(int64_t word) { at[count++] = word; }
    void put(AtenTensorHandle tensor) {
        void* found = nullptr;
        if (tensor) aoti_torch_get_data_ptr(tensor, &found);
        put(reinterpret_cast<int64_t>(found));
    }
    void put_strided(AtenTensorHandle tensor, int64_t dims) {  // for a matrix: the second and third dimension
        int64_t* strides = nullptr;
        if (tensor) aoti_torch_get_strides(tensor, &strides);
        put(tensor);
        for (int64_t i = 0; i < 3; ++i) put(tensor && i >= 3 - dims ? strides[i - 3 + dims] : int64_t(0));
    }
    AtenTensorHandle make(int64_t dims, const int64_t* sizes, bool wanted = true) {  // contiguous
        const int64_t none[] = {0, 0, 0}, strides[] = {dims > 1 ? sizes[1] * (dims > 2 ? sizes[2] : 1) : 1,
                                                       dims > 2 ? sizes[2] : 1, 1};
        AtenTensorHandle made = nullptr;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, wanted ? sizes : none, strides,
                                                             aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(),
                                                             0, &made));
        put(wanted ? made : nullptr);
        return made;
    }
};

static int64_t* sidefx_sizes(AtenTensorHandle tensor) {
    int64_t* sizes;
    aoti_torch_get_sizes(tensor, &sizes);
    return sizes;
}
"""
"""Arguments of the native modules that take one array of numbers."""

_LSTM = """
extern "C" {
SidefxLstm sidefx_lstm = nullptr;  // function of the native module
}

static void @KERNEL@lstm(AtenTensorHandle* made, AtenTensorHandle x, AtenTensorHandle w_ih, AtenTensorHandle w_hh,
                         AtenTensorHandle b_ih, AtenTensorHandle b_hh, AtenTensorHandle hx, AtenTensorHandle cx,
                         int64_t reverse, int64_t keep) {
    const int64_t *size = sidefx_sizes(x), length = size[0], rows = size[1], units = sidefx_sizes(w_hh)[1];
    const int64_t out[] = {length, rows, units}, kept[] = {length * rows * 5 * ((units + 15) / 16 * 16)};
    SidefxWords words;
    const int64_t sizes[] = {0, length, rows, size[2], units, reverse};
    for (int64_t word : sizes) words.put(word);
    words.put_strided(x, 3);
    const AtenTensorHandle taken[] = {w_ih, w_hh, b_ih, b_hh, hx, cx};
    for (AtenTensorHandle tensor : taken) words.put(tensor);
    made[0] = words.make(3, out);
    made[1] = words.make(2, out + 1);
    made[2] = words.make(2, out + 1);
    made[3] = words.make(1, kept, keep);
    sidefx_lstm(words.at);
}

static void @KERNEL@lstm_backward(AtenTensorHandle* made, AtenTensorHandle x, AtenTensorHandle w_ih,
                                  AtenTensorHandle w_hh, AtenTensorHandle hx, AtenTensorHandle cx,
                                  AtenTensorHandle output, AtenTensorHandle kept, AtenTensorHandle grad,
                                  AtenTensorHandle grad_hy, AtenTensorHandle grad_cy, int64_t reverse, int64_t wanted) {
    const int64_t *size = sidefx_sizes(x), rows = size[1], inputs = size[2], units = sidefx_sizes(w_hh)[1];
    const int64_t input[] = {4 * units, inputs}, hidden[] = {4 * units, units}, state[] = {rows, units};
    SidefxWords words;
    const int64_t sizes[] = {1, size[0], rows, inputs, units, reverse};
    for (int64_t word : sizes) words.put(word);
    words.put_strided(x, 3);
    words.put_strided(grad, 3);
    words.put_strided(grad_hy, 2);
    words.put_strided(grad_cy, 2);
    const AtenTensorHandle taken[] = {w_ih, w_hh, hx, cx, output, kept};
    for (AtenTensorHandle tensor : taken) words.put(tensor);
    made[0] = words.make(3, size, wanted & 1);
    made[1] = words.make(2, input, wanted & 2);
    made[2] = words.make(2, hidden, wanted & 2);
    made[3] = words.make(1, input, wanted & 2);
    made[4] = words.make(1, input, wanted & 2);
    made[5] = words.make(2, state, wanted & 4);
    made[6] = words.make(2, state, wanted & 4);
    sidefx_lstm(words.at);
}
"""

_ATTENTION = """
extern "C" {
SidefxAttention sidefx_attention = nullptr;  // function of the native module
}

struct SidefxAttentionWords : SidefxWords {  // for tensors [rows, heads, length, width]
    const int64_t* size;
    int32_t dtype;

    SidefxAttentionWords(int64_t which, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, int64_t causal,
                         double scale)
        : size(sidefx_sizes(q)) {
        aoti_torch_get_dtype(q, &dtype);
        const int64_t how = causal + 2 * (dtype == aoti_torch_dtype_bfloat16());
        const int64_t sizes[] = {which, size[0], size[1], size[2], sidefx_sizes(k)[2], size[3], how,
                                 __builtin_bit_cast(int64_t, scale)};
        for (int64_t word : sizes) put(word);
        put_heads(q);
        put_heads(k);
        put_heads(v);
    }
    void put_heads(AtenTensorHandle tensor) {
        int64_t* strides;
        aoti_torch_get_strides(tensor, &strides);
        put(tensor);
        for (int64_t i = 0; i < 4; ++i) put(strides[i]);
    }
    static AtenTensorHandle empty(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
        AtenTensorHandle made = nullptr;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype,
                                                             aoti_torch_device_type_cpu(), 0, &made));
        return made;
    }
    AtenTensorHandle make_heads(AtenTensorHandle like, int64_t heads_last) {  // or [rows, length, heads, ...]
        const int64_t* of = sidefx_sizes(like);
        const int64_t head = heads_last ? of[3] : of[2] * of[3], place = heads_last ? of[1] * of[3] : of[3];
        const int64_t strides[] = {of[1] * of[2] * of[3], head, place, 1};
        const AtenTensorHandle made = empty(4, of, strides, dtype);
        put_heads(made);
        return made;
    }
};

static void @KERNEL@attention(AtenTensorHandle* made, AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                              int64_t causal, double scale, int64_t heads_last) {
    SidefxAttentionWords words(0, q, k, v, causal, scale);
    const int64_t *size = words.size, strides[] = {size[1] * size[2], size[2], 1};
    made[0] = words.make_heads(q, heads_last & 1);
    made[1] = words.empty(3, size, strides, aoti_torch_dtype_float32());
    words.put(made[1]);
    sidefx_attention(words.at);
}

static void @KERNEL@attention_backward(AtenTensorHandle* made, AtenTensorHandle grad, AtenTensorHandle q,
                                       AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle out,
                                       AtenTensorHandle sums, int64_t causal, double scale, int64_t heads_last) {
    SidefxAttentionWords words(1, q, k, v, causal, scale);
    words.put_heads(out);
    words.put(sums);
    words.put_heads(grad);
    made[0] = words.make_heads(q, heads_last & 1);
    made[1] = words.make_heads(k, heads_last & 2);
    made[2] = words.make_heads(v, heads_last & 4);
    sidefx_attention(words.at);
}

static void @KERNEL@attention_backward_joined(AtenTensorHandle* made, AtenTensorHandle grad, AtenTensorHandle q,
                                              AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle out,
                                              AtenTensorHandle sums, int64_t causal, double scale) {
    SidefxAttentionWords words(1, q, k, v, causal, scale);
    words.put_heads(out);
    words.put(sums);
    words.put_heads(grad);
    const int64_t *size = words.size, wide = size[1] * size[3], all = 3 * wide;
    const int64_t sizes[] = {size[0], size[2], all}, strides[] = {size[2] * all, all, 1};
    made[0] = words.empty(3, sizes, strides, words.dtype);
    void* data;
    aoti_torch_get_data_ptr(made[0], &data);
    for (int64_t i = 0; i < 3; ++i) {
        const int64_t part[] = {reinterpret_cast<int64_t>(data) + i * wide * (words.at[6] & 2 ? 2 : 4), strides[0],
                                size[3], all, 1};
        for (int64_t word : part) words.put(word);
    }
    sidefx_attention(words.at);
}
"""


def kernels_called(caller: str) -> str:
    """Returns the declarations, before a wrapper, of the native modules' kernels that it calls."""
    parts = (("product", _PRODUCT), ("sum_rows", _SUM_ROWS), ("lstm", _LSTM), ("attention", _ATTENTION))
    used = [text for name, text in parts if compat.KERNEL_FUNCTION + name in caller]
    if any(text in (_LSTM, _ATTENTION) for text in used):
        used.insert(0, _WORDS)
    return "".join([_TYPES, *used]).replace("@KERNEL@", compat.KERNEL_FUNCTION) if used else ""


_DISPATCH = """
#include <@LISTS@>
@FAILURE@
static uint64_t sidefx_tensor(AtenTensorHandle tensor) {  // the dispatcher owns the handle
    AtenTensorHandle given = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &given));
    return reinterpret_cast<uint64_t>(given);
}
static uint64_t sidefx_optional(uint64_t given) {  // optional values have memory of their own
    return reinterpret_cast<uint64_t>(new uint64_t(given));
}
template <class... Items> static uint64_t sidefx_list(Items... items) {
    const uint64_t given[] = {items..., 0};
    StableListHandle list = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(sizeof...(items), &list));
    for (decltype(sizeof 0) i = 0; i < sizeof...(items); ++i) {
        AOTI_TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, given[i]));
    }
    return reinterpret_cast<uint64_t>(list);
}
[[maybe_unused]] static uint64_t sidefx_item(uint64_t list, decltype(sizeof 0) place) {  // the caller owns it
    StableIValue item = 0;
    AOTI_TORCH_ERROR_CODE_CHECK(torch_list_get_item(reinterpret_cast<StableListHandle>(list), place, &item));
    return item;
}
[[maybe_unused]] static void sidefx_delete_list(uint64_t list) {  // not its items
    AOTI_TORCH_ERROR_CODE_CHECK(torch_delete_list(reinterpret_cast<StableListHandle>(list)));
}
@STRINGS@
[[gnu::noinline, gnu::cold, noreturn]] static void sidefx_dispatch_failed(const char* name) {
    const char* reason = @REASON@;
    const char* frames = __builtin_strstr(reason, "\\n\\nAt:");  // of Python, if the operator is Python
    const int length = frames ? int(frames - reason) : int(__builtin_strlen(reason));
    SidefxFailure failure;
    __builtin_snprintf(failure.text, sizeof failure.text, "%s: %.*s", name, length, reason);
    throw failure;
}
static void @DISPATCH@(const char* name, const char* overload, uint64_t* stack) {
    if (__builtin_expect(aoti_torch_call_dispatcher(name, overload, stack) != 0, 0)) sidefx_dispatch_failed(name);
}
"""

_STRINGS = """
static uint64_t sidefx_string(const char* text, decltype(sizeof 0) length) {
    StringHandle handle = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(torch_new_string_handle(text, length, &handle));
    return reinterpret_cast<uint64_t>(handle);
}
"""


def dispatched_calls(caller: str) -> str:
    """Returns what a wrapper needs that calls operators through torch's dispatcher; empty if it calls none."""
    if compat.DISPATCH_FUNCTION not in caller:
        return ""
    reason = f"{compat.ERROR_FUNCTION}()" if compat.in_c_interface(compat.ERROR_FUNCTION) else '"the operator raised"'
    text = _DISPATCH.replace("@STRINGS@", _STRINGS if "sidefx_string(" in caller else "").replace("@REASON@", reason)
    text = text.replace("@FAILURE@", FAILURE)
    return text.replace("@DISPATCH@", compat.DISPATCH_FUNCTION).replace("@LISTS@", compat.LISTS_HEADER)
