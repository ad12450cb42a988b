"""C++ of the native module: an entry, held so that the garbage collector does not count it as a user of its objects.

An entry refers to the models and optimizers that it was captured for, by their parts as well, in many places. The
holder owns the entry, and the compiled step owns the holder. To find garbage, CPython's collector first subtracts the
references between the objects that it looks at from their reference counts (``subtract_refs``), then marks what is
reachable from those with references left. The holder reports its reference to the entry in the first pass only: the
collector takes what only the entry refers to for garbage, clears the weak references to it and calls their callbacks.
Such a callback drops the entry. As long as no callback has done that, the reference that the holder really owns makes
the collector keep everything (``handle_resurrected_objects``).

So whatever an entry may hold that has weak references or finalizers of its own (compiled graphs) is reported in both
passes, as ``shared``.
"""

SOURCE = r"""
struct EntryHolder {
    PyObject_HEAD
    PyObject *replay, *entry;  // null once dropped
    PyObject *shared, *missed;
    vectorcallfunc call;
};

static PyObject* holder_call(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
    auto* holder = reinterpret_cast<EntryHolder*>(self);
    PyObject* replay = holder->replay;
    if (!replay) return Py_NewRef(holder->missed);
    Py_INCREF(replay);  // the entry may be dropped while it runs
    PyObject* result = PyObject_Vectorcall(replay, args, count, names);
    Py_DECREF(replay);
    return result;
}

static int holder_traverse(PyObject* self, visitproc visit, void* arg) {
    auto* holder = reinterpret_cast<EntryHolder*>(self);
    Py_VISIT(holder->shared);
    Py_VISIT(holder->missed);
#ifndef Py_GIL_DISABLED
    // subtract_refs gives each object itself as the argument; no other pass does. The incremental collector, which only
    // 3.14.0 to 3.14.4 have, has passes of its own.
    const bool incremental = Py_Version >= 0x030E0000 && Py_Version < 0x030E0500;
    if (arg != self && !incremental) return 0;
#endif
    Py_VISIT(holder->replay);
    Py_VISIT(holder->entry);
    return 0;
}

static int holder_clear(PyObject* self) {
    auto* holder = reinterpret_cast<EntryHolder*>(self);
    Py_CLEAR(holder->replay);
    Py_CLEAR(holder->entry);
    Py_CLEAR(holder->shared);
    return 0;  // what a call gives stays
}

static void holder_free(PyObject* self) {
    PyObject_GC_UnTrack(self);
    holder_clear(self);
    Py_CLEAR(reinterpret_cast<EntryHolder*>(self)->missed);
    PyObject_GC_Del(self);
}

static PyObject* holder_entry(PyObject* self, void*) {
    PyObject* entry = reinterpret_cast<EntryHolder*>(self)->entry;
    return Py_NewRef(entry ? entry : Py_None);
}

static PyObject* holder_drop(PyObject* self, PyObject*) {
    holder_clear(self);
    Py_RETURN_NONE;
}

static PyGetSetDef holder_fields[] = {
    {"entry", holder_entry, nullptr, "The entry; None once it has been dropped.", nullptr}, {nullptr}};
static PyMethodDef holder_methods[] = {
    {"drop", holder_drop, METH_NOARGS, "Frees the entry."}, {nullptr, nullptr, 0, nullptr}};

static PyTypeObject holder_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// entry_holder(replay, entry, shared, missed) -> a callable: replay, or what gives ``missed`` once dropped.
static PyObject* entry_holder(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 4) { PyErr_SetString(PyExc_TypeError, "entry_holder takes 4 arguments"); return nullptr; }
    if (!holder_type.tp_name) {
        holder_type.tp_name = "sidefx_guards.EntryHolder";
        holder_type.tp_basicsize = sizeof(EntryHolder);
        holder_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
        holder_type.tp_vectorcall_offset = offsetof(EntryHolder, call);
        holder_type.tp_call = PyVectorcall_Call;
        holder_type.tp_traverse = holder_traverse;
        holder_type.tp_clear = holder_clear;
        holder_type.tp_dealloc = holder_free;
        holder_type.tp_getset = holder_fields;
        holder_type.tp_methods = holder_methods;
        if (PyType_Ready(&holder_type) < 0) { holder_type.tp_name = nullptr; return nullptr; }
    }
    auto* holder = PyObject_GC_New(EntryHolder, &holder_type);
    if (!holder) return nullptr;
    holder->replay = Py_NewRef(a[0]);
    holder->entry = Py_NewRef(a[1]);
    holder->shared = Py_NewRef(a[2]);
    holder->missed = Py_NewRef(a[3]);
    holder->call = holder_call;
    PyObject_GC_Track(holder);
    return reinterpret_cast<PyObject*>(holder);
}
"""
