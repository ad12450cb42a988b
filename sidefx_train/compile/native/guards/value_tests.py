"""C++ of the native module: tests of one value against what an entry holds.

Values are compared by type and contents, containers by keys, items or length, classes and modules by the names that a
step has looked up, functions by code and defaults.
"""

SOURCE = r"""
static binaryfunc dict_subscript;  // of a plain dict

static bool same_text(PyObject* a, PyObject* b) {
    PyObject *x = PyObject_Repr(a), *y = PyObject_Repr(b);
    const bool same = x && y && PyUnicode_Compare(x, y) == 0;
    Py_XDECREF(x); Py_XDECREF(y);
    return same;
}

static bool is_numpy_scalar(PyObject* value) {
    PyObject* bases = Py_TYPE(value)->tp_mro;
    for (Py_ssize_t i = 0; bases && i < PyTuple_GET_SIZE(bases); ++i)
        if (std::strcmp(((PyTypeObject*)PyTuple_GET_ITEM(bases, i))->tp_name, "numpy.generic") == 0) return true;
    return false;
}

// True if no program can distinguish two values: 1 is not True, 0.0 not -0.0, ranges have a stop, dates of
// NumPy a unit.
static bool same_value(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (Py_TYPE(a) != Py_TYPE(b)) return false;
    if (PyFloat_CheckExact(a)) {
        const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
        return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
    }
    if (PyComplex_CheckExact(a) || PyRange_Check(a) || PySlice_Check(a)) return same_text(a, b);
    if (PyTuple_CheckExact(a)) {
        const Py_ssize_t n = PyTuple_GET_SIZE(a);
        if (PyTuple_GET_SIZE(b) != n) return false;
        for (Py_ssize_t i = 0; i < n; ++i)
            if (!same_value(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
        return true;
    }
    if (PyFrozenSet_CheckExact(a)) {
        PyObject *x = PySequence_Tuple(a), *y = PySequence_Tuple(b);
        const bool same = x && y && same_value(x, y);
        Py_XDECREF(x); Py_XDECREF(y);
        return same;
    }
    if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
    return is_numpy_scalar(a) ? same_text(a, b) : PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// Keys of a dict, or members of a set, in order: plain ones by type and value, others by identity.
static bool same_keys(PyObject* value, PyObject* keys, bool plain) {
    const Py_ssize_t n = PyTuple_GET_SIZE(keys);
    auto same = [&](PyObject* a, PyObject* b) { return a == b || (plain && same_value(a, b)); };
    if (PyDict_Check(value) && !PyODict_Check(value)) {
        if (PyDict_Size(value) != n) return false;
        Py_ssize_t position = 0, i = 0;
        PyObject* key;
        while (PyDict_Next(value, &position, &key, nullptr))
            if (!same(key, PyTuple_GET_ITEM(keys, i++))) return false;
        return true;
    }
    PyObject* members = PySet_Check(value)     ? PySet_Type.tp_iter(value)
                        : PyODict_Check(value) ? PyODict_Type.tp_iter(value)
                                               : Py_NewRef(value);
    PyObject* found = members ? PySequence_Tuple(members) : nullptr;
    Py_XDECREF(members);
    if (!found) return false;
    bool equal = PyTuple_GET_SIZE(found) == n;
    for (Py_ssize_t i = 0; equal && i < n; ++i) equal = same(PyTuple_GET_ITEM(found, i), PyTuple_GET_ITEM(keys, i));
    Py_DECREF(found);
    return equal;
}

// A list or a tuple begins with these objects.
static bool same_items(PyObject* value, PyObject* items) {
    const Py_ssize_t n = PyTuple_GET_SIZE(items);
    if (!(PyList_Check(value) || PyTuple_Check(value)) || Py_SIZE(value) < n) return false;
    return memcmp(PySequence_Fast_ITEMS(value), PySequence_Fast_ITEMS(items), n * sizeof(PyObject*)) == 0;
}

// Bypasses the ``__len__`` of subclasses.
static Py_ssize_t stored_size(PyObject* value) {
    if (PyList_Check(value) || PyTuple_Check(value)) return Py_SIZE(value);
    if (PyDict_Check(value)) return reinterpret_cast<PyDictObject*>(value)->ma_used;
    if (PyAnySet_Check(value)) return PySet_GET_SIZE(value);
    return PyObject_Size(value);
}

static bool sized(PyObject* value) {
    return PyList_Check(value) || PyTuple_Check(value) || PyDict_Check(value) || PyAnySet_Check(value);
}

static bool stored(PyObject* value, PyObject* key) {
    if (PyDict_Check(value)) return PyDict_Contains(value, key) == 1;
    if (PyAnySet_Check(value)) return PySet_Contains(value, key) == 1;
    return PySequence_Contains(value, key) == 1;
}

// A version number that no other state of any dict has; 0 if this Python has none.
static uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    if (PyDict_Check(dict) && Py_TYPE(dict)->tp_as_mapping->mp_subscript == dict_subscript)
        return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#endif
    return 0;
}

// The same for a class (a change of a base counts) or the dict of a module.
static uint64_t version_of_space(PyObject* space, PyObject* entries) {
#if PY_VERSION_HEX >= 0x030D0000
    if (PyType_Check(space)) {
        auto* cls = reinterpret_cast<PyTypeObject*>(space);
        return PyUnstable_Type_AssignVersionTag(cls) ? cls->tp_version_tag : 0;
    }
#endif
    return version_of(entries);
}

// Names of a namespace are unchanged; ``operand`` is (bases of a class, names, values, sentinel for no value).
static bool same_names(PyObject* space, PyObject* operand, uint64_t& seen) {
    PyObject* entries = space;
    if (PyType_Check(space)) {
        auto* cls = reinterpret_cast<PyTypeObject*>(space);
        if (cls->tp_mro != PyTuple_GET_ITEM(operand, 0)) return false;
        entries = cls->tp_dict;
    }
    if (!entries || !PyDict_Check(entries)) return false;
    const uint64_t version = version_of_space(space, entries);
    if (version && version == seen) return true;
    PyObject *names = PyTuple_GET_ITEM(operand, 1), *values = PyTuple_GET_ITEM(operand, 2);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
        PyObject* found = PyDict_GetItemWithError(entries, PyTuple_GET_ITEM(names, i));
        if ((found ? found : PyTuple_GET_ITEM(operand, 3)) != PyTuple_GET_ITEM(values, i)) return false;
    }
    seen = version;
    return true;
}

// A function's code and defaults; ``operand`` is (code, defaults, keyword defaults, keys and values of these).
static bool same_body(PyObject* value, PyObject* operand) {
    if (!PyFunction_Check(value)) return false;
    PyObject *defaults = PyFunction_GET_DEFAULTS(value), *named = PyFunction_GET_KW_DEFAULTS(value);
    if (PyFunction_GET_CODE(value) != PyTuple_GET_ITEM(operand, 0) ||
        (defaults ? defaults : Py_None) != PyTuple_GET_ITEM(operand, 1) ||
        (named ? named : Py_None) != PyTuple_GET_ITEM(operand, 2))
        return false;
    if (!named) return true;
    PyObject *entries = PyTuple_GET_ITEM(operand, 3), *key, *entry;
    if (PyDict_Size(named) * 2 != PyTuple_GET_SIZE(entries)) return false;
    Py_ssize_t position = 0, i = 0;
    while (PyDict_Next(named, &position, &key, &entry)) {
        PyObject* wanted = PyTuple_GET_ITEM(entries, i);
        if (entry != PyTuple_GET_ITEM(entries, i + 1)) return false;
        if (key != wanted && PyUnicode_Compare(key, wanted) != 0) return false;
        i += 2;
    }
    return true;
}
"""
