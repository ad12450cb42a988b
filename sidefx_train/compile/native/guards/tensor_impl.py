"""C++ of the native module: metadata of a held tensor, read directly from torch's ``TensorImpl``.

torch's own check takes some 50 ns per tensor, and a step with AdamW holds four tensors per parameter. ``c10``'s header
is small enough to include. The offsets of ``TensorImpl`` and hooks in a tensor's Python object are searched for, not
assumed; if they are not found, or there is no header, ``tensors_readable()`` is false and torch checks.
"""

SOURCE = r"""
#include <cmath>
#include <vector>
#if __has_include(<c10/core/TensorImpl.h>) && !defined(SIDEFX_NO_C10)
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#define SIDEFX_TENSORS 1
#endif

struct HeldTensor;  // metadata of a tensor when the program was built

// Words between a tensor's PyObject and its TensorImpl pointer; hooks and post-accumulate hooks follow. -1: unknown.
static Py_ssize_t impl_word = -1;

static PyTypeObject* tensor_type;  // torch.Tensor

static PyObject** tensor_words(PyObject* tensor) { return reinterpret_cast<PyObject**>(tensor); }

// A tensor's hooks (1) or post-accumulate hooks (2).
static PyObject* hooks_of(PyObject* tensor, int which) {
    PyObject* found = tensor_words(tensor)[impl_word + which];
    return found ? found : Py_None;
}

#ifdef SIDEFX_TENSORS
static c10::TensorImpl* impl_of(PyObject* tensor) {
    return reinterpret_cast<c10::TensorImpl*>(tensor_words(tensor)[impl_word]);
}

static bool requires_grad_of(c10::TensorImpl* impl) {
    auto* meta = impl->autograd_meta();  // most state tensors have none
    return meta && meta->requires_grad();
}

// Address of a tensor's storage, whatever part of it the tensor views.
static const void* place_of(c10::TensorImpl* impl) {
    return impl->unsafe_storage() ? impl->unsafe_storage().data() : nullptr;
}

struct HeldTensor {
    PyObject* tensor;  // borrowed: the tuple of instructions owns it
    PyObject *hooks, *late_hooks;  // borrowed too; null: not checked
    const void* place;  // address of its storage when the guards last held
    PyTypeObject* type;
    c10::DispatchKeySet keys;
    caffe2::TypeMeta dtype;
    c10::Device device;
    bool requires_grad;
    size_t dims, layout;  // sizes and strides lie one after the other in the program's layouts

    HeldTensor(PyObject* tensor, PyObject* hooks, PyObject* late_hooks, std::vector<int64_t>& layouts)
        : tensor(tensor), hooks(hooks), late_hooks(late_hooks), place(place_of(impl_of(tensor))), type(Py_TYPE(tensor)),
          keys(impl_of(tensor)->key_set()), dtype(impl_of(tensor)->dtype()),
          device(impl_of(tensor)->device()), requires_grad(requires_grad_of(impl_of(tensor))),
          dims(impl_of(tensor)->sizes().size()), layout(layouts.size()) {
        for (int64_t size : impl_of(tensor)->sizes()) layouts.push_back(size);
        for (int64_t stride : impl_of(tensor)->strides()) layouts.push_back(stride);
    }

    void settle() { place = place_of(impl_of(tensor)); }

    // Another storage address alone is no mismatch: ``moved`` is set.
    bool matches(const int64_t* layouts, bool& moved) const {
        if (Py_TYPE(tensor) != type) return false;
        if ((hooks && hooks_of(tensor, 1) != hooks) || (late_hooks && hooks_of(tensor, 2) != late_hooks)) return false;
        c10::TensorImpl* impl = impl_of(tensor);
        if (!impl || impl->key_set() != keys || impl->dtype() != dtype) return false;
        if (impl->has_symbolic_sizes_strides()) return false;
        const auto sizes = impl->sizes(), strides = impl->strides();
        if (sizes.size() != dims) return false;
        const int64_t* wanted = layouts + layout;
        for (size_t i = 0; i < dims; ++i)  // faster than a call of memcmp
            if (sizes[i] != wanted[i] || strides[i] != wanted[dims + i]) return false;
        moved |= place_of(impl) != place;
        return impl->device() == device && requires_grad_of(impl) == requires_grad;
    }
};

// Dispatch keys that the thread includes and excludes: inference mode, functorch, ...
struct ThreadKeys {
    uint64_t included, excluded;
    static ThreadKeys now() {
        const auto keys = c10::impl::tls_local_dispatch_key_set();
        return {keys.included_.raw_repr(), keys.excluded_.raw_repr()};
    }
    bool operator==(const ThreadKeys& other) const {
        return included == other.included && excluded == other.excluded;
    }
};
#else
struct HeldTensor {
    HeldTensor(PyObject*, PyObject*, PyObject*, std::vector<int64_t>&) {}
    bool matches(const int64_t*, bool&) const { return false; }
    void settle() {}
};
struct ThreadKeys {
    static ThreadKeys now() { return {}; }
    bool operator==(const ThreadKeys&) const { return true; }
};
#endif

// find_tensor_words(tensor, address, hooks, late_hooks): the tensor has this TensorImpl and these two hook dicts.
static PyObject* find_tensor_words(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 4) { PyErr_SetString(PyExc_TypeError, "find_tensor_words takes 4 arguments"); return nullptr; }
    impl_word = -1;
    tensor_type = Py_TYPE(a[0]);
#ifdef SIDEFX_TENSORS
    PyObject** words = tensor_words(a[0]);
    void* address = PyLong_AsVoidPtr(a[1]);
    if (PyErr_Occurred()) return nullptr;
    const Py_ssize_t size = Py_TYPE(a[0])->tp_basicsize / (Py_ssize_t)sizeof(PyObject*);
    for (Py_ssize_t i = sizeof(PyObject) / sizeof(PyObject*); i + 2 < size; ++i)
        if ((void*)words[i] == address && words[i + 1] == a[2] && words[i + 2] == a[3]) impl_word = i;
#endif
    Py_RETURN_NONE;
}

static PyObject* tensors_readable(PyObject*, PyObject*) { return PyBool_FromLong(impl_word >= 0); }
"""
