/* Reads a stretch of a file into many places of memory, and takes the digest of each, in one call.

   A little is read and digested at a time, so that the digest finds it in the processor's cache; to come back to the
   interpreter in between, where threads wait for each other, would take longer than that spares. The digests are those
   of the xxHash library that Python's package of that name has within it: this file is given its functions.

   A file whose reads pass by the page cache is read into memory that such reads can go to, and copied from there. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { BITE = 256 << 10, PAGE = 4096, DIGEST = 16 };

/* xxHash's public interface, as far as it is used here. */
typedef struct {
    uint64_t low, high;
} Hash;

typedef struct {
    void *(*create)(void);
    int (*release)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t size);
    Hash (*result)(const void *state);
} Hasher;

static void write_big_endian(unsigned char *to, uint64_t number) {
    for (int place = 7; place >= 0; place--, number >>= 8)
        to[place] = (unsigned char)number;
}

/* A file, and the part of it that lies in memory on its way: pages of it, where there is such memory at all. */
typedef struct {
    int file;
    char *pages;
    int64_t room, begin, end;
} Source;

/* How many bytes were read, at least one unless the file ends there; -1 and errno where that failed. */
static ssize_t read_some(Source *source, int64_t offset, char *to, int64_t wanted, int64_t beyond) {
    if (source->pages == NULL)
        return pread(source->file, to, (size_t)wanted, (off_t)offset);
    if (offset < source->begin || offset >= source->end) {
        int64_t first = offset / PAGE * PAGE, last = (offset + beyond + PAGE - 1) / PAGE * PAGE;
        size_t size = (size_t)(last - first < source->room ? last - first : source->room);
        source->begin = source->end = first;
        ssize_t got = pread(source->file, source->pages, size, (off_t)first);
        if (got < 0)
            return -1;
        source->end = first + got;
        if (source->end <= offset)
            return 0;
    }
    int64_t held = source->end - offset;
    size_t size = (size_t)(held < wanted ? held : wanted);
    memcpy(to, source->pages + (offset - source->begin), size);
    return (ssize_t)size;
}

/* How much was filled: all, or less where the file ends; -1 and errno where that failed. `beyond` is how much will be
   wanted, from the offset on. */
static Py_ssize_t fill(Source *source, int64_t offset, char *to, Py_ssize_t size, int64_t beyond, const Hasher *hasher,
                       void *state) {
    Py_ssize_t filled = 0;
    while (filled < size) {
        int64_t wanted = size - filled < BITE ? size - filled : BITE;
        ssize_t got = read_some(source, offset + filled, to + filled, wanted, beyond - filled);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        hasher->update(state, to + filled, (size_t)got);
        filled += got;
    }
    return filled;
}

/* How many parts were filled, and in `end` where in the file that came to its end; -1 and errno where it failed. */
static Py_ssize_t fill_all(Source *source, const Py_buffer *parts, Py_ssize_t count, const Hasher *hasher,
                           unsigned char *digests, int64_t *end) {
    void *state = hasher->create();
    if (state == NULL) {
        errno = ENOMEM;
        return -1;
    }
    int64_t beyond = 0;
    for (Py_ssize_t part = 0; part < count; part++)
        beyond += parts[part].len;
    Py_ssize_t part = 0, filled = 0;
    for (; part < count; part++, digests += DIGEST) {
        hasher->reset(state);
        filled = fill(source, *end, parts[part].buf, parts[part].len, beyond, hasher, state);
        if (filled < 0)
            break;
        *end += filled;
        beyond -= filled;
        if (filled < parts[part].len)
            break;
        Hash hash = hasher->result(state);
        write_big_endian(digests, hash.high);
        write_big_endian(digests + DIGEST / 2, hash.low);
    }
    int failure = errno;
    hasher->release(state);
    errno = failure;
    return filled < 0 ? -1 : part;
}

static PyObject *read_held(Source *source, int64_t end, const Py_buffer *parts, Py_ssize_t count, const Hasher *hasher) {
    unsigned char *digests = PyMem_Malloc((size_t)count * DIGEST + 1);
    if (digests == NULL)
        return PyErr_NoMemory();
    Py_ssize_t filled;
    Py_BEGIN_ALLOW_THREADS
    filled = fill_all(source, parts, count, hasher, digests, &end);
    Py_END_ALLOW_THREADS
    PyObject *result = filled < 0 ? PyErr_SetFromErrno(PyExc_OSError)
                                  : Py_BuildValue("Ly#", (long long)end, (char *)digests, filled * DIGEST);
    PyMem_Free(digests);
    return result;
}

static PyObject *read_places(Source *source, int64_t offset, PyObject *places, const Hasher *hasher) {
    Py_ssize_t held = 0, count = PySequence_Size(places);
    if (count < 0)
        return NULL;
    Py_buffer *parts = PyMem_Malloc((size_t)count * sizeof(Py_buffer) + 1);
    if (parts == NULL)
        return PyErr_NoMemory();
    for (; held < count; held++) {
        PyObject *place = PySequence_GetItem(places, held);
        int got = place == NULL ? -1 : PyObject_GetBuffer(place, &parts[held], PyBUF_WRITABLE);
        Py_XDECREF(place);
        if (got < 0)
            break;
    }
    PyObject *result = held < count ? NULL : read_held(source, offset, parts, count, hasher);
    while (held > 0)
        PyBuffer_Release(&parts[--held]);
    PyMem_Free(parts);
    return result;
}

static PyObject *read_digested(PyObject *module, PyObject *arguments) {
    (void)module;
    int file;
    long long offset;
    PyObject *places, *result = NULL;
    Py_buffer functions, pages;
    if (!PyArg_ParseTuple(arguments, "iLOy*w*:read_digested", &file, &offset, &places, &functions, &pages))
        return NULL;
    Source source = {file, pages.len ? pages.buf : NULL, pages.len, 0, 0};
    if (functions.len != (Py_ssize_t)sizeof(Hasher))
        PyErr_SetString(PyExc_ValueError, "the addresses of five functions are expected");
    else if (pages.len % PAGE)
        PyErr_SetString(PyExc_ValueError, "memory for whole pages is expected");
    else
        result = read_places(&source, offset, places, functions.buf);
    PyBuffer_Release(&functions);
    PyBuffer_Release(&pages);
    return result;
}

static PyMethodDef methods[] = {
    {"read_digested", read_digested, METH_VARARGS,
     "Fills places of memory from a file, and gives where that ended and the digests of those that are full."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_reads", "Reads and digests many pieces of a file in one call.", 0, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__reads(void) { return PyModuleDef_Init(&definition); }
