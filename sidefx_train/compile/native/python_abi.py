"""Declares what native code needs of Python, without its header, which takes longer to read than most code to
compile."""

from __future__ import annotations

import sys
import sysconfig

PYTHON_HEADER = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
"""

_DECLARED = r"""
#include <stddef.h>
#include <stdint.h>

struct _object;
typedef _object PyObject;
typedef __PTRDIFF_TYPE__ Py_ssize_t;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);

struct PyMethodDef {
    const char* name;
    PyCFunction function;
    int flags;
    const char* text;
};
struct PyModuleDef_Base {
    Py_ssize_t references;
    void* type;
    PyObject* (*init)();
    Py_ssize_t index;
    PyObject* copy;
};
struct PyModuleDef {
    PyModuleDef_Base base;
    const char* name;
    const char* text;
    Py_ssize_t size;
    PyMethodDef* methods;
    void *slots, *traverse, *clear, *free;
};

extern "C" {
extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_RuntimeError, *PyExc_TypeError;
PyObject* PyModule_Create2(PyModuleDef*, int);
PyObject* Py_NewRef(PyObject*);
void PyErr_SetString(PyObject*, const char*);
PyObject* PyErr_Occurred();
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
PyObject* PyList_New(Py_ssize_t);
Py_ssize_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, Py_ssize_t);
int PyList_SetItem(PyObject*, Py_ssize_t, PyObject*);
PyObject* PyBool_FromLong(long);
double PyFloat_AsDouble(PyObject*);
long PyLong_AsLong(PyObject*);
long long PyLong_AsLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
int PyObject_IsTrue(PyObject*);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

static inline Py_ssize_t PyTuple_GET_SIZE(PyObject* tuple) { return reinterpret_cast<Py_ssize_t*>(tuple)[2]; }
static inline PyObject* PyTuple_GET_ITEM(PyObject* tuple, Py_ssize_t i) {
    return reinterpret_cast<PyObject**>(tuple)[FIRST_ITEM + i];
}

#define PyModuleDef_HEAD_INIT {1, nullptr, nullptr, 0, nullptr}
#define PyModule_Create(module) PyModule_Create2(module, 1013)
#define PyMODINIT_FUNC extern "C" __attribute__((visibility("default"))) PyObject*
#define METH_NOARGS 0x0004
#define METH_O 0x0008
#define METH_FASTCALL 0x0080
#define Py_None (&_Py_NoneStruct)
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyList_SET_ITEM PyList_SetItem
#define Py_BEGIN_ALLOW_THREADS { void* thread = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS PyEval_RestoreThread(thread); }
"""


def python_header() -> str:
    """Returns declarations of what products, updates and wrappers call; Python's own header if unsure."""
    version = sys.version_info[:2]
    known = sys.implementation.name == "cpython" and (3, 11) <= version <= (3, 14)
    usual = sys.platform == "linux" and sys.maxsize == 2**63 - 1
    special = sysconfig.get_config_var("Py_GIL_DISABLED") or hasattr(sys, "getobjects")
    if not known or not usual or special:
        return PYTHON_HEADER
    return f"#define FIRST_ITEM {4 if version >= (3, 14) else 3}  // from 3.14 on, a tuple keeps its hash\n{_DECLARED}"
