"""C++ of the native module: guards on objects that an entry holds, as a program of tests.

An instruction reads one value (from a register, a constant, or one step below either) and tests it. A value that later
instructions read from is kept in a register. If something cannot be read the check fails, so a program never relies on
what it has not tested itself. A tensor's hooks are read only from objects known to be tensors. The tests of one value
are in ``value_tests.py``.
"""

LOADS = ("const", "register", "dict", "entry", "item", "slot", "cell", "grad", "call", "hooks", "late_hooks", "gate",
         "tensors")  # fmt: skip
"""How an instruction reads its value; ``dict`` is the instance ``__dict__``, ``entry`` a key of such a dict, ``hooks``
and ``late_hooks`` are a tensor's; ``gate`` reads nothing: it opens a group (see ``guards/native_check.py``).
``tensors`` checks all held tensors: its base is a tuple of (tensor, hooks, post-accumulate hooks), with ``...`` for
hooks that are not checked."""

TESTS = (
    "none", "is", "same", "type", "equal", "length", "empty", "keys", "items", "absent", "no_item", "names", "code",
    "distinct", "storage_sharing",
)  # fmt: skip
"""What it tests; for ``names`` and ``code`` see ``guards/definition_guards.py``, for ``storage_sharing``
``guards/storage_guards.py``. The operands of ``distinct`` are registers whose objects must all be different, or the
first of which (their number) must be none of the others."""

SOURCE = r"""
enum Load {
    L_CONST, L_REGISTER, L_DICT, L_ENTRY, L_ITEM, L_SLOT, L_CELL, L_GRAD, L_CALL, L_HOOKS, L_LATE_HOOKS, L_GATE,
    L_TENSORS
};
enum Test {
    T_NONE, T_IS, T_SAME, T_TYPE, T_EQUAL, T_LENGTH, T_EMPTY, T_KEYS, T_ITEMS, T_ABSENT, T_NO_ITEM, T_NAMES, T_CODE,
    T_DISTINCT, T_STORAGE_SHARING
};

// Fields that every call reads, two instructions per cache line. Objects are borrowed from the tuple of instructions.
struct Instruction {
    uint8_t load, test;
    int32_t source, target;  // registers; -1: none. A gate's target: how much of its group may be skipped
    int32_t number;          // a length, or a register to compare with; for a gate, the length of its group
    union {
        PyObject* operand;
        uint64_t version;    // for a gate: version of its dict when its group last held
    };
    PyObject* cached;        // a constant, or the value last read from a dict unchanged since; a gate's dict
};

// State to read a value that is not cached.
struct Reading {
    PyObject *base, *key;
    Py_hash_t hash;
    int32_t index;     // the key as an index, or -1
    uint64_t version;  // version of a namespace when it last held
};

// Registers whose objects must all be distinct, or of which the first must be distinct from the others.
struct Group {
    std::vector<int32_t> registers;
    size_t ones;                  // 0: all distinct
    std::vector<PyObject*> seen;  // their objects when that last held

    bool holds(PyObject** values) {
        bool unchanged = seen.size() == registers.size();
        for (size_t i = 0; unchanged && i < registers.size(); ++i) unchanged = values[registers[i]] == seen[i];
        if (unchanged) return true;
        size_t size = 1;
        while (size < 2 * registers.size()) size *= 2;
        std::vector<PyObject*> table(size, nullptr);
        auto slot = [&](PyObject* value) -> PyObject*& {  // its slot, or a free one
            size_t place = (reinterpret_cast<uintptr_t>(value) >> 4) & (size - 1);
            while (table[place] && table[place] != value) place = (place + 1) & (size - 1);
            return table[place];
        };
        for (size_t i = ones; i < registers.size(); ++i) {
            PyObject*& found = slot(values[registers[i]]);
            if (found && !ones) return false;
            found = values[registers[i]];
        }
        for (size_t i = 0; i < ones; ++i)
            if (slot(values[registers[i]])) return false;
        seen.clear();
        for (int32_t place : registers) seen.push_back(values[place]);
        return true;
    }
};

// A function that the program holds, with its code and defaults at capture.
struct HeldBody { PyObject *function, *operand; };

// A class or a module's dict that the program holds; ``entries`` are those of the class, ``version`` as in Reading.
struct HeldNames { PyObject *space, *operand, *entries; uint64_t version; };

struct GuardProgram {
    std::vector<Instruction> code;
    std::vector<Reading> readings;  // one per instruction
    std::vector<HeldBody> bodies;
    std::vector<HeldNames> names;
    std::vector<Group> groups;
    std::vector<HeldTensor> tensors;
    std::vector<int64_t> layouts;
    ThreadKeys keys = ThreadKeys::now();
    std::vector<const char*> touched;  // memory that the instructions read lately
    uint64_t runs = 0;
    Py_ssize_t registers = 0;
    bool moved = false;  // the address of a held tensor has changed since the guards last held
};

static PyObject *name_dict, *name_grad;

// Between two steps of a training loop the caches lose most of what a program reads: it is prefetched. The prefetched
// memory may have been freed.
constexpr Py_ssize_t AHEAD = 8;

static inline void fetch(const void* address) { __builtin_prefetch(address); }

// A separate loop: a step with AdamW holds four tensors per parameter.
static bool same_tensors(GuardProgram& program) {
    const int64_t* layouts = program.layouts.data();
    for (const HeldTensor& tensor : program.tensors)
        if (!tensor.matches(layouts, program.moved)) return false;
    return true;
}

// Reads a value, null if it does not exist (with or without an exception set). ``owned`` gets what must be
// released: what is read from a constant, a register, a dict or a sequence is borrowed.
static inline PyObject* load_value(
    GuardProgram& program, const Instruction& in, PyObject** registers, PyObject*& owned) {
    if (in.load == L_CONST) return in.cached;
    const Reading& how = program.readings[&in - program.code.data()];
    PyObject* from = in.source >= 0 ? registers[in.source] : how.base;
    switch (in.load) {
        case L_REGISTER:
            return from;
        case L_DICT:
            if (PyObject** place = _PyObject_GetDictPtr(from); place && *place) return *place;
            return owned = PyObject_GenericGetAttr(from, name_dict);  // bypasses a ``__getattribute__`` of the user's
        case L_ENTRY:
        case L_ITEM:
            // Bypasses methods of subclasses; adds nothing to a defaultdict.
            if (PyDict_Check(from)) return _PyDict_GetItem_KnownHash(from, how.key, how.hash);
            if (how.index >= 0 && PyList_Check(from))
                return how.index < PyList_GET_SIZE(from) ? PyList_GET_ITEM(from, how.index) : nullptr;
            if (how.index >= 0 && PyTuple_Check(from))
                return how.index < PyTuple_GET_SIZE(from) ? PyTuple_GET_ITEM(from, how.index) : nullptr;
            return owned = PyObject_GetItem(from, how.key);
        case L_SLOT:
            return owned = PyObject_GetAttr(from, how.key);
        case L_CELL:
            if (!PyCell_Check(from)) return nullptr;
            return owned = PyCell_Get(from);
        case L_GRAD:
            return owned = PyObject_GetAttr(from, name_grad);
        case L_HOOKS:
        case L_LATE_HOOKS:
            return hooks_of(from, in.load == L_HOOKS ? 1 : 2);
        case L_TENSORS:
            return same_tensors(program) ? from : nullptr;
        default:
            return owned = PyObject_CallNoArgs(from);
    }
}

// Separate loops: half of what a step reads are functions and namespaces of libraries.
static bool same_bodies(const GuardProgram& program) {
    const Py_ssize_t n = program.bodies.size();
    const HeldBody* body = program.bodies.data();
    for (Py_ssize_t i = 0; i < n; ++i, ++body) {
        if (i + AHEAD < n) {
            fetch(&((PyFunctionObject*)body[AHEAD].function)->func_defaults);
            fetch(&PyTuple_GET_ITEM(body[AHEAD].operand, 0));
        }
        if (!same_body(body->function, body->operand)) return false;
    }
    return true;
}

static bool same_namespaces(GuardProgram& program) {
    const Py_ssize_t n = program.names.size();
    HeldNames* names = program.names.data();
    for (Py_ssize_t i = 0; i < n; ++i, ++names) {
        if (i + AHEAD < n) {
            HeldNames& later = names[AHEAD];
            fetch(reinterpret_cast<char*>(later.entries) + 2 * sizeof(PyObject));
            if (later.space != later.entries) {
                fetch(&((PyTypeObject*)later.space)->tp_dict);
                fetch(&((PyTypeObject*)later.space)->tp_mro);
            }
        }
        if (!same_names(names->space, names->operand, names->version)) return false;
    }
    return true;
}

// Storage sharing of held tensors is unchanged: checked only if an address has changed, or if ``number`` says always.
static bool same_memory(GuardProgram& program, const Instruction& in) {
    if (!program.moved && in.number != 1) return true;
    PyObject* answer = PyObject_CallNoArgs(in.operand);
    const bool same = answer == Py_True;
    Py_XDECREF(answer);
    if (same) for (HeldTensor& tensor : program.tensors) tensor.settle();
    return same;
}

static bool test_value(GuardProgram& program, const Instruction& in, PyObject* value, PyObject** registers) {
    switch (in.test) {
        case T_NONE: return true;
        case T_IS: return value == in.operand;
        case T_SAME: return value == registers[in.number];
        case T_TYPE: return (PyObject*)Py_TYPE(value) == in.operand;
        case T_EQUAL: return same_value(value, in.operand);
        case T_LENGTH: return stored_size(value) == in.number;
        case T_EMPTY: return stored_size(value) == 0;
        case T_KEYS: return same_keys(value, in.operand, in.number == 1);
        case T_ITEMS: return same_items(value, in.operand);
        case T_ABSENT: return PyDict_Check(value) && PyDict_Contains(value, in.operand) == 0;
        case T_NO_ITEM: return !stored(value, in.operand) && !PyErr_Occurred();
        case T_NAMES: return same_names(value, in.operand, program.readings[&in - program.code.data()].version);
        case T_CODE: return same_body(value, in.operand);
        case T_DISTINCT: return program.groups[program.readings[&in - program.code.data()].index].holds(registers);
        default: return same_memory(program, in);
    }
}

struct Registers {
    std::vector<PyObject*> values;
    explicit Registers(Py_ssize_t n) : values(n, nullptr) {}
    ~Registers() { for (PyObject* value : values) Py_XDECREF(value); }
};

// Tests a value and keeps it if it is read again. Some tests may run methods of the user's: the value, borrowed from
// a container, is owned during the test.
static inline bool finish(GuardProgram& program, const Instruction& in, PyObject* value, PyObject** registers) {
    if (!value) return false;
    if (in.test == T_KEYS || in.test == T_NO_ITEM || ((in.test == T_LENGTH || in.test == T_EMPTY) && !sized(value))) {
        Py_INCREF(value);
        const bool holds = test_value(program, in, value, registers);
        if (holds && in.target >= 0) registers[in.target] = Py_NewRef(value);
        Py_DECREF(value);
        return holds;
    }
    if (!test_value(program, in, value, registers)) return false;
    if (in.target >= 0) registers[in.target] = Py_NewRef(value);
    return true;
}

// Records what an instruction reads: the head of its value, and the location of an instance's ``__dict__``.
static void note(GuardProgram& program, const Instruction& in, PyObject* value, PyObject** registers) {
    if (in.load == L_DICT) {
        PyObject* from = in.source >= 0 ? registers[in.source] : program.readings[&in - program.code.data()].base;
        program.touched.push_back(reinterpret_cast<const char*>(_PyObject_GetDictPtr(from)));
    } else if (in.load == L_CELL && in.source < 0) {
        program.touched.push_back(reinterpret_cast<const char*>(program.readings[&in - program.code.data()].base));
    }
    if (value && in.test != T_IS) program.touched.push_back(reinterpret_cast<const char*>(value));
}

template <bool NOTING>
static inline bool run_one(GuardProgram& program, Instruction& in, PyObject** registers) {
    PyObject* owned = nullptr;
    in.cached = load_value(program, in, registers, owned);
    if (NOTING) note(program, in, in.cached, registers);
    const bool holds = finish(program, in, in.cached, registers);
    Py_XDECREF(owned);
    return holds;
}

template <bool NOTING>
static bool run_code(GuardProgram& program, PyObject** registers) {
    Instruction* next = program.code.data();
    Instruction* const end = next + program.code.size();
    while (next < end) {
        Instruction& gate = *next++;
        if (gate.load != L_GATE) {
            if (!run_one<NOTING>(program, gate, registers)) return false;
            continue;
        }
        PyObject* dict = registers[gate.source];
        const uint64_t version = version_of(dict);
        Instruction* const last = next + gate.number;
        if (version && dict == gate.cached && version == gate.version) {
            for (next += gate.target; next < last; ++next) {
                PyObject* value = next->load == L_REGISTER ? registers[next->source] : next->cached;
                if (NOTING) note(program, *next, value, registers);
                if (!finish(program, *next, value, registers)) return false;
            }
        } else {
            gate.cached = nullptr;
            for (; next < last; ++next)
                if (!run_one<NOTING>(program, *next, registers)) return false;
            gate.cached = dict;
            gate.version = version;
        }
    }
    return true;
}

static bool holds_all(GuardProgram& program) {
    for (const char* address : program.touched) fetch(address + sizeof(PyObject));
    if (!same_bodies(program) || !same_namespaces(program)) return false;
    Registers kept(program.registers);
    program.moved = false;
    const uint64_t runs = ++program.runs;
    if (runs & (runs - 1)) return run_code<false>(program, kept.values.data());
    program.touched.clear();  // after 1, 2, 4, ... runs: objects may have been replaced
    return run_code<true>(program, kept.values.data());
}

static PyObject* passed_on = nullptr;  // the function given to let_through

// let_through(asked): errors for which asked(error) is true leave checks; by default none does.
static PyObject* let_through(PyObject*, PyObject* asked) {
    Py_INCREF(asked);
    Py_XSETREF(passed_on, asked);
    Py_RETURN_NONE;
}

// Clears the error of a check, or returns true if it is the program's: an interrupt, or one of its signal handlers.
static bool is_program_error() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
    PyObject *kind, *error, *where;
    PyErr_Fetch(&kind, &error, &where);
    bool passes = false;
    if (where && passed_on) {  // raised by Python code
        PyErr_NormalizeException(&kind, &error, &where);
        PyException_SetTraceback(error, where);
        PyObject* answer = PyObject_CallOneArg(passed_on, error);
        passes = answer == Py_True;
        Py_XDECREF(answer);
    }
    if (passes) {
        PyErr_Restore(kind, error, where);
        return true;
    }
    PyErr_Clear();  // of the call
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(where);
    return false;
}

// The check itself, a function without arguments; its self is (capsule, instructions).
static PyObject* run_guards(PyObject* self, PyObject*) {
    auto* program = static_cast<GuardProgram*>(PyCapsule_GetPointer(PyTuple_GET_ITEM(self, 0), nullptr));
    if (!program) return nullptr;
    const bool holds = (program->tensors.empty() || program->keys == ThreadKeys::now()) && holds_all(*program);
    if (PyErr_Occurred() && is_program_error()) return nullptr;
    return PyBool_FromLong(holds);
}

static PyMethodDef run_guards_method = {"check_objects", run_guards, METH_NOARGS, "True while every guard holds."};

static void free_program(PyObject* capsule) {
    delete static_cast<GuardProgram*>(PyCapsule_GetPointer(capsule, nullptr));
}

// guard_program(instructions) -> check(); each instruction is the tuple
// (load, source register or -1, base, key, test, operand, number, target register or -1): base is the object to read
// from without a source register; number 1 says that keys are plain. A register is written before it is read.
// A gate's number is the length of its group, its target how many instructions of it depend on the dict alone.
static PyObject* guard_program(PyObject*, PyObject* instructions) {
    if (!name_dict) {
        name_dict = PyUnicode_InternFromString("__dict__");
        dict_subscript = PyDict_Type.tp_as_mapping->mp_subscript;
        name_grad = PyUnicode_InternFromString("grad");
    }
    if (!PyTuple_Check(instructions)) { PyErr_SetString(PyExc_TypeError, "a tuple of instructions"); return nullptr; }
    auto* program = new GuardProgram;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(instructions); ++i) {
        PyObject* t = PyTuple_GET_ITEM(instructions, i);
        Instruction in;
        Reading how{};
        int load, test;
        Py_ssize_t source, number, target;
        PyObject*& operand = in.operand;
        if (!PyArg_ParseTuple(t, "inOOiOnn", &load, &source, &how.base, &how.key, &test, &operand, &number, &target)) {
            delete program;
            return nullptr;
        }
        in.load = (uint8_t)load;
        in.test = (uint8_t)test;
        in.source = (int32_t)source;
        in.target = (int32_t)target;
        in.number = (int32_t)number;
        in.cached = load == L_CONST ? how.base : nullptr;
        if (load == L_CONST && target < 0 && test == T_CODE && PyFunction_Check(how.base)) {
            program->bodies.push_back({how.base, operand});
            continue;
        }
        if (load == L_CONST && target < 0 && test == T_NAMES) {
            PyObject* entries = PyType_Check(how.base) ? ((PyTypeObject*)how.base)->tp_dict : how.base;
            program->names.push_back({how.base, operand, entries, 0});
            continue;
        }
        how.hash = load == L_ENTRY || load == L_ITEM ? PyObject_Hash(how.key) : 0;
        how.index = PyLong_CheckExact(how.key) ? (int32_t)PyLong_AsSsize_t(how.key) : -1;
        if (PyErr_Occurred()) { delete program; return nullptr; }
        if (test == T_DISTINCT) {
            Group group{{}, (size_t)number, {}};
            for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(operand); ++k)
                group.registers.push_back((int32_t)PyLong_AsLong(PyTuple_GET_ITEM(operand, k)));
            how.index = (int32_t)program->groups.size();
            program->groups.push_back(std::move(group));
        }
        if (load == L_GATE) {
            in.version = 0;
        } else if (load == L_TENSORS) {
            for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(how.base); ++k) {
                PyObject* held = PyTuple_GET_ITEM(how.base, k);
                auto asked = [&](int which) {
                    PyObject* hooks = PyTuple_GET_ITEM(held, which);
                    return hooks == Py_Ellipsis ? nullptr : hooks;
                };
                program->tensors.emplace_back(PyTuple_GET_ITEM(held, 0), asked(1), asked(2), program->layouts);
            }
        }
        if (load != L_GATE && in.target >= program->registers) program->registers = in.target + 1;
        program->code.push_back(in);
        program->readings.push_back(how);
    }
    PyObject* capsule = PyCapsule_New(program, nullptr, free_program);
    if (!capsule) { delete program; return nullptr; }
    PyObject* self = PyTuple_Pack(2, capsule, instructions);
    Py_DECREF(capsule);
    if (!self) return nullptr;
    PyObject* check = PyCFunction_New(&run_guards_method, self);
    Py_DECREF(self);
    return check;
}
"""
