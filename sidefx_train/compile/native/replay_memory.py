"""C++ of the native module: addresses of tensors that a replay relies on, and who else uses its results."""

SOURCE = r"""
#ifdef SIDEFX_TENSORS
static const void* address_of(PyObject* tensor) {
    c10::TensorImpl* impl = impl_of(tensor);
    if (!impl->unsafe_storage()) return nullptr;
    const char* begin = static_cast<const char*>(impl->unsafe_storage().data());
    return begin + impl->storage_offset() * impl->itemsize();
}

static c10::TensorImpl* gradient_of(PyObject* tensor) {
    auto* meta = impl_of(tensor)->autograd_meta();
    // An at::Tensor is one pointer to its TensorImpl.
    return meta ? *reinterpret_cast<c10::TensorImpl* const*>(&meta->grad()) : nullptr;
}

static bool has_weak_references(PyObject* object) {
    const Py_ssize_t at = Py_TYPE(object)->tp_weaklistoffset;
    return at != 0 && *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + at);
}

// References to a tensor: Python's, those of C++, and both kinds to its storage.
struct Uses {
    int64_t python, tensor, storage, storage_python;
    static Uses of(PyObject* tensor, PyObject* storage) {
        c10::TensorImpl* impl = impl_of(tensor);
        return {(int64_t)Py_REFCNT(tensor), (int64_t)c10::raw::intrusive_ptr::use_count(impl),
                (int64_t)impl->unsafe_storage().use_count(), (int64_t)Py_REFCNT(storage)};
    }
};

// The references are those of before, and perhaps one more: of ``holder.grad``.
static bool is_unshared(PyObject* tensor, PyObject* storage, const Uses& before, PyObject* holder,
                        int64_t as_gradient) {
    if (hooks_of(tensor, 1) != Py_None || hooks_of(tensor, 2) != Py_None || has_weak_references(tensor)) return false;
    const Uses now = Uses::of(tensor, storage);
    if (now.storage != before.storage || now.storage_python != before.storage_python) return false;
    if (now.tensor == before.tensor) return now.python == before.python;
    if (now.tensor != before.tensor + 1 || gradient_of(holder) != impl_of(tensor)) return false;
    return now.python == before.python + (before.tensor == 1 ? as_gradient : 0);
}
#endif

// uses_of(tensors, storages): bytes with the references to every tensor of a list, and to its storage.
static PyObject* uses_of(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 2) { PyErr_SetString(PyExc_TypeError, "uses_of takes 2 arguments"); return nullptr; }
#ifdef SIDEFX_TENSORS
    std::vector<Uses> uses;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a[0]); ++i)
        uses.push_back(Uses::of(PyList_GET_ITEM(a[0], i), PyList_GET_ITEM(a[1], i)));
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(uses.data()), uses.size() * sizeof(Uses));
#else
    return PyBytes_FromStringAndSize(nullptr, 0);
#endif
}

// are_at(args, positions, addresses): every args[positions[i]] begins at the i-th address.
static PyObject* are_at(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 3) { PyErr_SetString(PyExc_TypeError, "are_at takes 3 arguments"); return nullptr; }
#ifdef SIDEFX_TENSORS
    const auto* addresses = reinterpret_cast<const uint64_t*>(PyBytes_AsString(a[2]));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a[1]); ++i) {
        PyObject* tensor = PyList_GET_ITEM(a[0], PyLong_AsSsize_t(PyTuple_GET_ITEM(a[1], i)));
        if (reinterpret_cast<uint64_t>(address_of(tensor)) != addresses[i]) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
#else
    Py_RETURN_FALSE;
#endif
}

// are_unshared(tensors, storages, addresses, uses, args, holders, as_gradient): every tensor is where it was, and
// nothing but the gradient of args[holders[i]] uses it since ``uses`` were counted; that adds ``as_gradient`` to the
// count of Python.
static PyObject* are_unshared(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 7) { PyErr_SetString(PyExc_TypeError, "are_unshared takes 7 arguments"); return nullptr; }
#ifdef SIDEFX_TENSORS
    const auto* addresses = reinterpret_cast<const uint64_t*>(PyBytes_AsString(a[2]));
    const auto* uses = reinterpret_cast<const Uses*>(PyBytes_AsString(a[3]));
    const Py_ssize_t as_gradient = PyLong_AsSsize_t(a[6]);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a[0]); ++i) {
        PyObject *tensor = PyList_GET_ITEM(a[0], i), *storage = PyList_GET_ITEM(a[1], i);
        PyObject* holder = PyList_GET_ITEM(a[4], PyLong_AsSsize_t(PyTuple_GET_ITEM(a[5], i)));
        if (reinterpret_cast<uint64_t>(address_of(tensor)) != addresses[i]) Py_RETURN_FALSE;
        if (!is_unshared(tensor, storage, uses[i], holder, as_gradient)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
#else
    Py_RETURN_FALSE;
#endif
}
"""
