/* What hundreds of tensors are, and where, in one call: see kernels/tensors.py, which also finds out what `struct torch` says.
 *
 * Python asks a tensor one thing at a time, and for one tensor after the other. Behind a backward pass nothing of them lies in the core's
 * caches, and each question waits for memory. Here the tensors to come are fetched while one is looked at.
 *
 * The caller holds Python's lock. Of Python, a handful of functions is used whose signatures have never changed; of torch, its stable C
 * interface (torch/csrc/inductor/aoti_torch/c/shim.h, as of torch 2.6 and later), whose handle of a tensor is the address of the pointer
 * to its implementation: the one that a Python tensor holds. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern intptr_t PyList_Size(void *list);
extern void *PyList_GetItem(void *list, intptr_t index);
extern intptr_t PyDict_Size(void *dict);
extern int PyDict_Next(void *dict, intptr_t *position, void **key, void **value);

#ifdef _WIN32
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED
#endif
#ifdef __GNUC__
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif

enum { AHEAD = 32 }; /* tensors that are fetched at once: about as many lines as a core waits for at a time */
enum { LINE = 64 };

/* Where to find, in bytes: in a Python object its type and the pointer to its implementation; in that the set of dispatch keys and the
 * pointer to what autograd knows; in that the gradient, as such a pointer again, or NOT_READ where nobody knows. And torch's functions. */
struct torch {
    int64_t type, implementation, keys, autograd, gradient;
    int32_t (*dim)(void *tensor, int64_t *);
    int32_t (*sizes)(void *tensor, int64_t **);
    int32_t (*strides)(void *tensor, int64_t **);
    int32_t (*dtype)(void *tensor, int32_t *);
    int32_t (*device)(void *tensor, int32_t *);
    int32_t (*data)(void *tensor, void **);
    int32_t (*layout)(void *tensor, int32_t *);
    int32_t (*assign)(void *tensor, void *to); /* `to` lets go of what it held, and holds that tensor from then on */
    int64_t strided; /* that layout */
    void *nothing; /* the implementation of the tensor that is none: what holds nothing points to it */
    const void *classes[2]; /* torch.Tensor and torch.nn.Parameter: what can be read */
};

/* What a tensor is. Its keys say layout, kind of device, and whether it is negated or conjugated where it is read. */
struct fact {
    const void *type;
    uint64_t keys;
    int32_t dtype, device;
    int64_t dims, extents; /* where its sizes begin among all, which its strides follow */
};

enum { NOT_READ = -1, VERSION = 2 };

/* What the other side must have in mind when it calls anything here. */
EXPORTED const int64_t flashoptim_tensors_expects[] = {VERSION, sizeof(struct torch), sizeof(struct fact)};

#define AT(object, offset) ((char *)(object) + (offset))
#define LOAD(object, offset) (*(char **)AT(object, offset))

static uint64_t keys_of(const struct torch *torch, void *handle) {
    uint64_t keys;
    memcpy(&keys, AT(LOAD(handle, 0), torch->keys), sizeof keys);
    return keys;
}

static bool is(const struct torch *torch, void *handle, const struct fact *fact, const int64_t *extents, int64_t *address) {
    if (keys_of(torch, handle) != fact->keys)
        return false; /* sparse tensors end here, which have no strides to ask for, and a gradient that is not there */
    int32_t dtype, device;
    int64_t dims, *sizes, *strides;
    void *data;
    if (torch->dtype(handle, &dtype) || dtype != fact->dtype || torch->device(handle, &device) || device != fact->device)
        return false;
    if (torch->dim(handle, &dims) || dims != fact->dims || torch->sizes(handle, &sizes) || torch->strides(handle, &strides))
        return false;
    const int64_t *expected = extents + fact->extents;
    for (int64_t i = 0; i < dims; i++)
        if (sizes[i] != expected[i] || strides[i] != expected[dims + i])
            return false;
    if (torch->data(handle, &data))
        return false;
    *address = (int64_t)(intptr_t)data;
    return true;
}

/* What the tensors of a list are, into `facts` and `extents`, which has room for `room` numbers. NOT_READ: one of them is of another class
 * or layout, or there are not `count` of them, or there is no room; else how many numbers it took. */
EXPORTED int64_t flashoptim_learn_tensors(
    const struct torch *torch, void *list, struct fact *facts, int64_t *extents, int64_t count, int64_t room) {
    int64_t used = 0;
    if (PyList_Size(list) != count)
        return NOT_READ;
    for (intptr_t i = 0; i < count; i++) {
        void *object = PyList_GetItem(list, i), *handle = AT(object, torch->implementation);
        struct fact *fact = facts + i;
        int32_t layout;
        int64_t *sizes, *strides;
        fact->type = LOAD(object, torch->type);
        if (fact->type != torch->classes[0] && fact->type != torch->classes[1])
            return NOT_READ;
        fact->keys = keys_of(torch, handle);
        fact->extents = used;
        if (torch->layout(handle, &layout) || layout != torch->strided || torch->dtype(handle, &fact->dtype)
            || torch->device(handle, &fact->device) || torch->dim(handle, &fact->dims) || torch->sizes(handle, &sizes)
            || torch->strides(handle, &strides) || used + 2 * fact->dims > room)
            return NOT_READ;
        memcpy(extents + used, sizes, (size_t)fact->dims * sizeof *sizes);
        memcpy(extents + used + fact->dims, strides, (size_t)fact->dims * sizeof *strides);
        used += 2 * fact->dims;
    }
    return used;
}

/* The beginning of an implementation, as far as its keys. */
static void fetch(const struct torch *torch, void *handle) {
    for (int64_t at = 0; at <= torch->keys; at += LINE)
        FETCH(AT(LOAD(handle, 0), at));
}

/* Whether the tensors of a list are all what `facts` say, one by one; then their addresses, int64. Anything may be in the list. */
EXPORTED int flashoptim_read_tensors(
    const struct torch *torch, void *list, const struct fact *facts, const int64_t *extents, int64_t count, int64_t *addresses) {
    if (PyList_Size(list) != count)
        return 0;
    for (int64_t begin = 0; begin < count; begin += AHEAD) {
        const int64_t end = count - begin < AHEAD ? count : begin + AHEAD;
        for (int64_t i = begin; i < end; i++)
            FETCH(PyList_GetItem(list, i));
        for (int64_t i = begin; i < end; i++) {
            void *object = PyList_GetItem(list, i);
            if (LOAD(object, torch->type) != facts[i].type)
                return 0; /* which also says whether it is a tensor: nothing else was asked before */
            fetch(torch, AT(object, torch->implementation));
        }
        for (int64_t i = begin; i < end; i++)
            if (!is(torch, AT(PyList_GetItem(list, i), torch->implementation), facts + i, extents, addresses + i))
                return 0;
    }
    return 1;
}

/* Let go of the first tensors that are held. */
EXPORTED void flashoptim_release(struct torch *torch, void **held, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        torch->assign(&torch->nothing, held + i);
}

/* How many were read and are held: all, or those before one that is none of what it should be. */
static int64_t hold_gradients(
    const struct torch *torch, void *list, const struct fact *facts, const int64_t *extents, int64_t count, int64_t *addresses, void **held) {
    void *handles[AHEAD];
    for (int64_t begin = 0; begin < count; begin += AHEAD) {
        const int64_t size = count - begin < AHEAD ? count - begin : AHEAD;
        for (int64_t i = 0; i < size; i++)
            FETCH(PyList_GetItem(list, begin + i));
        for (int64_t i = 0; i < size; i++)
            FETCH(AT(LOAD(PyList_GetItem(list, begin + i), torch->implementation), torch->autograd));
        for (int64_t i = 0; i < size; i++) {
            void *autograd = LOAD(LOAD(PyList_GetItem(list, begin + i), torch->implementation), torch->autograd);
            if (!autograd)
                return begin;
            handles[i] = AT(autograd, torch->gradient);
            FETCH(handles[i]);
        }
        for (int64_t i = 0; i < size; i++)
            fetch(torch, handles[i]);
        for (int64_t i = 0; i < size; i++) {
            if (!is(torch, handles[i], facts + begin + i, extents, addresses + begin + i))
                return begin + i;
            held[begin + i] = torch->nothing;
            if (torch->assign(handles[i], held + begin + i))
                return begin + i;
        }
    }
    return count;
}

/* `flashoptim_read_tensors` of the gradients of a list's tensors, of which Python makes objects when it is asked for them for the first
 * time. `held`: a pointer to the implementation of each, with which it stays alive although nobody else may keep it. Only what is read is
 * held, until `flashoptim_release`. */
EXPORTED int flashoptim_read_gradients(
    struct torch *torch, void *list, const struct fact *facts, const int64_t *extents, int64_t count, int64_t *addresses, void **held) {
    if (torch->gradient == NOT_READ || PyList_Size(list) != count)
        return 0;
    const int64_t read = hold_gradients(torch, list, facts, extents, count, addresses, held);
    if (read < count)
        flashoptim_release(torch, held, read);
    return read == count;
}

/* Whether the items of `part` are those of `whole` from `begin` on. */
EXPORTED int flashoptim_same_items(void *part, void *whole, int64_t begin) {
    const intptr_t count = PyList_Size(part);
    if (begin + count > PyList_Size(whole))
        return 0;
    for (intptr_t i = 0; i < count; i++)
        if (PyList_GetItem(part, i) != PyList_GetItem(whole, begin + i))
            return 0;
    return 1;
}

/* Whether a dictionary has these keys and values, in this order and by identity, and each value, which is a dictionary, so many entries. */
EXPORTED int flashoptim_same_entries(void *dict, void *keys, void *values, const int64_t *sizes) {
    const intptr_t count = PyList_Size(keys);
    if (PyDict_Size(dict) != count)
        return 0;
    intptr_t position = 0;
    void *key, *value;
    for (intptr_t i = 0; i < count && PyDict_Next(dict, &position, &key, &value); i++)
        if (key != PyList_GetItem(keys, i) || value != PyList_GetItem(values, i) || PyDict_Size(value) != sizes[i])
            return 0;
    return 1;
}
