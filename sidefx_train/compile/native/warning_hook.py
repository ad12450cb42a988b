"""C++ of the native module: a function that is called before each ``warnings.warn`` of a thread.

``warnings.warn`` is C code, so only its entry in CPython's method table can be replaced for all that refer to it. The
entry leads to the original, after the observer of the thread, if it has one.
"""

SOURCE = r"""
using WarnFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
static WarnFunction original_warn = nullptr;
static thread_local PyObject* warning_observer = nullptr;

static PyObject* observed_warn(PyObject* module, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    if (PyObject* observer = warning_observer) {
        Py_INCREF(observer);
        PyObject* done = PyObject_CallNoArgs(observer);
        Py_DECREF(observer);
        if (!done) return nullptr;
        Py_DECREF(done);
    }
    return original_warn(module, args, count, names);
}

static bool hook_warn() {
    if (original_warn) return true;
    PyObject* module = PyImport_ImportModule("_warnings");
    PyObject* warn = module ? PyObject_GetAttrString(module, "warn") : nullptr;
    if (warn && PyCFunction_CheckExact(warn) && PyCFunction_GET_FLAGS(warn) == (METH_FASTCALL | METH_KEYWORDS)) {
        PyMethodDef* method = reinterpret_cast<PyCFunctionObject*>(warn)->m_ml;
        original_warn = reinterpret_cast<WarnFunction>(reinterpret_cast<void*>(method->ml_meth));
        method->ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(observed_warn));
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_NotImplementedError, "warnings.warn is not the C function of CPython 3.11 to 3.14");
    }
    Py_XDECREF(warn);
    Py_XDECREF(module);
    return original_warn != nullptr;
}

// observe_warnings(observer or None) -> the observer of this thread before, or None.
static PyObject* observe_warnings(PyObject*, PyObject* observer) {
    if (!hook_warn()) return nullptr;
    PyObject* before = warning_observer;
    warning_observer = Py_IsNone(observer) ? nullptr : Py_NewRef(observer);
    return before ? before : Py_NewRef(Py_None);
}
"""
