"""C++ of the native module: gradients and version counters of many tensors, set in one call.

A step with AdamW sets one gradient per parameter; as many attribute accesses of generated Python code take longer than
everything else that the host does in a replay.
"""

SOURCE = r"""
#ifdef SIDEFX_TENSORS
// A tensor, also of a subclass, with a known layout.
static bool is_readable_tensor(PyObject* value) {
    return impl_word >= 0 && (Py_TYPE(value) == tensor_type || PyType_IsSubtype(Py_TYPE(value), tensor_type));
}

// Its version counter, null if it has none or is no tensor.
static const c10::VariableVersion* counter_of(PyObject* value) {
    if (!is_readable_tensor(value)) return nullptr;
    const c10::VariableVersion& counter = impl_of(value)->version_counter();
    return counter.enabled() ? &counter : nullptr;
}

// ``holder``, of torch.Tensor or nn.Parameter, has this gradient already.
static bool has_gradient(PyObject* holder, PyObject* gradient) {
    return is_readable_tensor(gradient) && gradient_of(holder) == impl_of(gradient);
}
#else
static bool has_gradient(PyObject*, PyObject*) { return false; }
#endif

// set_gradients(holders, results, positions): holders[i].grad = results[positions[i]]. The holders are of torch.Tensor
// or nn.Parameter.
static PyObject* set_gradients(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 3) { PyErr_SetString(PyExc_TypeError, "set_gradients takes 3 arguments"); return nullptr; }
    static PyObject* const name = PyUnicode_InternFromString("grad");
    if (!name) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a[0]); ++i) {
        PyObject* holder = PyTuple_GET_ITEM(a[0], i);
        PyObject* result = PySequence_GetItem(a[1], PyLong_AsSsize_t(PyTuple_GET_ITEM(a[2], i)));
        if (!result) return nullptr;
        const bool failed = !has_gradient(holder, result) && PyObject_SetAttr(holder, name, result) < 0;
        Py_DECREF(result);
        if (failed) return nullptr;
    }
    Py_RETURN_NONE;
}

// set_versions(tensors, versions): sets version counters; false if there is a tensor whose counter is not known here.
static PyObject* set_versions(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 2) { PyErr_SetString(PyExc_TypeError, "set_versions takes 2 arguments"); return nullptr; }
#ifdef SIDEFX_TENSORS
    PyObject** tensors = PySequence_Fast_ITEMS(a[0]);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a[1]); ++i) {
        const c10::VariableVersion* counter = counter_of(tensors[i]);
        const auto version = (uint32_t)PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(a[1], i));
        if (!counter) Py_RETURN_FALSE;
        if (counter->current_version() != version) c10::VariableVersion(*counter).set_version(version);
    }
    Py_RETURN_TRUE;
#else
    Py_RETURN_FALSE;
#endif
}

// increment_versions(tensors, positions): increments the version counter of tensors[i] for each position, or of all for
// None; of one that occurs twice, twice. False, and none is incremented, if there is one whose counter is not known.
static PyObject* increment_versions(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 2) { PyErr_SetString(PyExc_TypeError, "increment_versions takes 2 arguments"); return nullptr; }
#ifdef SIDEFX_TENSORS
    PyObject** tensors = PySequence_Fast_ITEMS(a[0]);
    const bool all = Py_IsNone(a[1]);
    const Py_ssize_t n = all ? Py_SIZE(a[0]) : PyTuple_GET_SIZE(a[1]);
    auto tensor = [&](Py_ssize_t i) { return tensors[all ? i : PyLong_AsSsize_t(PyTuple_GET_ITEM(a[1], i))]; };
    for (Py_ssize_t i = 0; i < n; ++i)
        if (!counter_of(tensor(i))) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < n; ++i) impl_of(tensor(i))->bump_version();
    Py_RETURN_TRUE;
#else
    Py_RETURN_FALSE;
#endif
}
"""
