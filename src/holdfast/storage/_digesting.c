/* Fills many places of memory from a file in one call, or writes them to one, and takes their digests.

   What is read or written is digested a little at a time, so that it is still in the processor's cache. To come back to
   the interpreter in between, where threads wait for each other, would take longer than that spares, and would hold up
   the thread that trains. The digests are those of the xxHash library that Python's package of that name has within it:
   this file is given its functions.

   A file whose reads pass by the page cache is read into memory that such reads can go to, and copied from there. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#define _FILE_OFFSET_BITS 64
#include <Python.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* A digest is that many hexadecimal characters. */
enum { BITE = 256 << 10, PAGE = 4096, DIGEST = 32 };

/* How numbers are stored, as `FLOAT_MARKS` in digesting.py names it; and what takes its place where one is not finite. */
enum { OTHER, F16, BF16, F32, F64, NONFINITE = 128 };

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

/* Whether one of the numbers has all bits of its exponent set. They are looked at as integers, wherever they begin; and
   so many at a time that compilers use vectors. */
#define ANY_PLACE __attribute__((may_alias, aligned(1)))
#define DEFINE_HAS_NONFINITE(name, type, mask, target)                                           \
    target static int name(const char *data, size_t size) {                                             \
        typedef type ANY_PLACE number;                                                           \
        enum { TOGETHER = 1024 };                                                                \
        const number *numbers = (const number *)data;                                            \
        size_t count = size / sizeof(type);                                                      \
        for (; count >= TOGETHER; count -= TOGETHER, numbers += TOGETHER) {                      \
            type found = 0;                                                                      \
            for (int place = 0; place < TOGETHER; place++)                                       \
                found |= (type)((numbers[place] & (type)(mask)) == (type)(mask));                \
            if (found)                                                                           \
                return 1;                                                                        \
        }                                                                                        \
        for (size_t place = 0; place < count; place++)                                           \
            if ((numbers[place] & (type)(mask)) == (type)(mask))                                 \
                return 1;                                                                        \
        return 0;                                                                                \
    }

#define DEFINE_ALL_HAS_NONFINITE(suffix, target)                                                 \
    DEFINE_HAS_NONFINITE(has_nonfinite_f16##suffix, uint16_t, 0x7c00, target)                    \
    DEFINE_HAS_NONFINITE(has_nonfinite_bf16##suffix, uint16_t, 0x7f80, target)                   \
    DEFINE_HAS_NONFINITE(has_nonfinite_f32##suffix, uint32_t, 0x7f800000, target)                \
    DEFINE_HAS_NONFINITE(has_nonfinite_f64##suffix, uint64_t, 0x7ff0000000000000, target)        \
    static int has_nonfinite##suffix(unsigned char kind, const char *data, size_t size) {        \
        switch (kind) {                                                                          \
        case F16: return has_nonfinite_f16##suffix(data, size);                                  \
        case BF16: return has_nonfinite_bf16##suffix(data, size);                                \
        case F32: return has_nonfinite_f32##suffix(data, size);                                  \
        case F64: return has_nonfinite_f64##suffix(data, size);                                  \
        default: return 0;                                                                       \
        }                                                                                        \
    }

DEFINE_ALL_HAS_NONFINITE(, )

/* Processors of the last ten years look at twice as many numbers at a time as all of that kind can. */
#if defined(__x86_64__)
DEFINE_ALL_HAS_NONFINITE(_wide, __attribute__((target("avx2"))))
#define HAS_NONFINITE(...) \
    (__builtin_cpu_supports("avx2") ? has_nonfinite_wide(__VA_ARGS__) : has_nonfinite(__VA_ARGS__))
#else
#define HAS_NONFINITE has_nonfinite
#endif

static void write_number(char *to, uint64_t number) {
    for (int place = DIGEST / 2 - 1; place >= 0; place--, number >>= 4)
        to[place] = "0123456789abcdef"[number & 15];
}

static void write_digest(char *to, Hash hash) {
    write_number(to, hash.high);
    write_number(to + DIGEST / 2, hash.low);
}

/* Their text, for the interpreter. */
static PyObject *list_digests(const char *digests, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t place = 0; list != NULL && place < count; place++) {
        PyObject *text = PyUnicode_FromStringAndSize(digests + place * DIGEST, DIGEST);
        /* The list takes it over; one that has a gap is let go of as a whole. */
        if (text == NULL || PyList_SetItem(list, place, text) < 0)
            Py_CLEAR(list);
    }
    return list;
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

/* Whether a read that a signal has cut short goes on. Handlers run in the main thread alone, and what they raise ends it:
   on some file systems a read waits for a server as long as nobody interrupts it. */
static int goes_on(void) {
    PyGILState_STATE held = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(held);
    return raised == 0;
}

/* How much was filled: all, or less where the file ends; -1 and errno where that failed. `beyond` is how much will be
   wanted, from the offset on. */
static Py_ssize_t fill(Source *source, int64_t offset, char *to, Py_ssize_t size, int64_t beyond, const Hasher *hasher,
                       void *state) {
    Py_ssize_t filled = 0;
    while (filled < size) {
        int64_t wanted = size - filled < BITE ? size - filled : BITE;
        ssize_t got = read_some(source, offset + filled, to + filled, wanted, beyond - filled);
        if (got < 0 && errno == EINTR && goes_on())
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        /* What a signal has cut short in the middle tells of no error. */
        if (got < wanted && source->pages == NULL && !goes_on())
            return -1;
        hasher->update(state, to + filled, (size_t)got);
        filled += got;
    }
    return filled;
}

/* `marks` has a byte for each that is digested by `digest_place`, if it is there. */
typedef struct {
    Py_buffer *parts;
    Py_ssize_t count;
    unsigned char *marks;
} Places;

/* How many places were filled, and in `end` where in the file that came to its end; -1 and errno where it failed. */
static Py_ssize_t digest_all(Source *source, const Places *places, const Hasher *hasher, char *digests,
                             int64_t *end) {
    void *state = hasher->create();
    if (state == NULL) {
        errno = ENOMEM;
        return -1;
    }
    int64_t beyond = 0;
    for (Py_ssize_t place = 0; place < places->count; place++)
        beyond += places->parts[place].len;
    Py_ssize_t place = 0, filled = 0;
    for (; place < places->count; place++, digests += DIGEST) {
        const Py_buffer *part = &places->parts[place];
        hasher->reset(state);
        filled = fill(source, *end, part->buf, part->len, beyond, hasher, state);
        if (filled < 0)
            break;
        *end += filled;
        beyond -= filled;
        if (filled < part->len)
            break;
        write_digest(digests, hasher->result(state));
    }
    int failure = errno;
    hasher->release(state);
    errno = failure;
    return filled < 0 ? -1 : place;
}

/* Without the interpreter's lock: where it ended, and the digests. */
static PyObject *digested(Source *source, int64_t end, const Places *places, const Hasher *hasher) {
    char *digests = PyMem_Malloc((size_t)places->count * DIGEST + 1);
    if (digests == NULL)
        return PyErr_NoMemory();
    Py_ssize_t done;
    Py_BEGIN_ALLOW_THREADS
    done = digest_all(source, places, hasher, digests, &end);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    PyObject *list = done >= 0 ? list_digests(digests, done) : NULL;
    if (list != NULL)
        result = Py_BuildValue("LN", (long long)end, list);
    else if (!PyErr_Occurred())
        PyErr_SetFromErrno(PyExc_OSError);
    PyMem_Free(digests);
    return result;
}

static void let_go(Places *places) {
    while (places->count > 0)
        PyBuffer_Release(&places->parts[--places->count]);
    PyMem_Free(places->parts);
}

/* The memory of all, kept where it is until it is let go of; -1 and an error where that cannot be had. */
static int hold(PyObject *sequence, int flags, Places *places) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0)
        return -1;
    places->count = 0;
    places->marks = NULL;
    places->parts = PyMem_Malloc((size_t)count * sizeof(Py_buffer) + 1);
    if (places->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; places->count < count; places->count++) {
        PyObject *place = PySequence_GetItem(sequence, places->count);
        int got = place == NULL ? -1 : PyObject_GetBuffer(place, &places->parts[places->count], flags);
        Py_XDECREF(place);
        if (got < 0) {
            let_go(places);
            return -1;
        }
    }
    return 0;
}

/* Whether the sequence has marks; -1 and an error where these do not fit. */
static int hold_marks(PyObject *sequence, Places *places, Py_buffer *marks) {
    PyObject *found = PyObject_GetAttrString(sequence, "marks");
    if (found == NULL) {
        PyErr_Clear();
        return 0;
    }
    int got = PyObject_GetBuffer(found, marks, PyBUF_WRITABLE);
    Py_DECREF(found);
    if (got == 0 && marks->len != places->count) {
        PyBuffer_Release(marks);
        PyErr_SetString(PyExc_ValueError, "a mark for each place is expected");
        return -1;
    }
    places->marks = got == 0 ? marks->buf : NULL;
    return got == 0 ? 1 : -1;
}

/* What is written, by so many bytes at a time; a write that is cut short goes on at the beginning of a page. */
typedef struct {
    int file;
    const char *data;
    int64_t size, offset, piece, page;
} Target;

static int write_piece(const Target *target, int64_t begin, int64_t end) {
    while (begin < end) {
        ssize_t written =
            pwrite(target->file, target->data + begin, (size_t)(end - begin), (off_t)(target->offset + begin));
        if (written < 0) {
            if (errno == EINTR && goes_on())
                continue;
            return -1;
        }
        written -= written % target->page;
        if (written == 0) {
            errno = EIO;
            return -1;
        }
        begin += written;
    }
    return 0;
}

/* The digest of a place, and in its mark, if it has one, whether a number there is not finite: all are looked at a little
   at a time, while they are in the processor's cache. */
static Hash digest_place(const Places *places, Py_ssize_t place, const Hasher *hasher, void *state) {
    const Py_buffer *part = &places->parts[place];
    const char *data = part->buf;
    size_t size = (size_t)part->len;
    unsigned char kind = places->marks != NULL ? places->marks[place] : OTHER;
    int found = 0;
    hasher->reset(state);
    if (kind == OTHER)
        hasher->update(state, data, size);
    else {
        for (size_t begin = 0; begin < size; begin += BITE) {
            size_t bite = size - begin < BITE ? size - begin : BITE;
            hasher->update(state, data + begin, bite);
            found |= HAS_NONFINITE(kind, data + begin, bite);
        }
        places->marks[place] = found ? NONFINITE : OTHER;
    }
    return hasher->result(state);
}

/* How many places have digests: all; or -1 and errno where a write failed. A place is digested before the piece is
   written in which it begins. */
static Py_ssize_t write_all(const Target *target, const Places *places, const Hasher *hasher, char *digests) {
    void *state = hasher->create();
    if (state == NULL) {
        errno = ENOMEM;
        return -1;
    }
    Py_ssize_t place = 0;
    int64_t begin = 0;
    int failed;
    do {
        int64_t end = target->size - begin < target->piece ? target->size : begin + target->piece;
        for (; place < places->count; place++, digests += DIGEST) {
            const Py_buffer *part = &places->parts[place];
            if (end < target->size && (uintptr_t)part->buf >= (uintptr_t)target->data + (uintptr_t)end)
                break;
            write_digest(digests, digest_place(places, place, hasher, state));
        }
        failed = write_piece(target, begin, end);
        begin = end;
    } while (!failed && begin < target->size);
    int failure = errno;
    hasher->release(state);
    errno = failure;
    return failed ? -1 : place;
}

/* Without the interpreter's lock: the digests. */
static PyObject *written(const Target *target, const Places *places, const Hasher *hasher) {
    char *digests = PyMem_Malloc((size_t)places->count * DIGEST + 1);
    if (digests == NULL)
        return PyErr_NoMemory();
    Py_ssize_t done;
    Py_BEGIN_ALLOW_THREADS
    done = write_all(target, places, hasher, digests);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (done >= 0)
        result = list_digests(digests, done);
    else if (!PyErr_Occurred())
        PyErr_SetFromErrno(PyExc_OSError);
    PyMem_Free(digests);
    return result;
}

static PyObject *write_digested(PyObject *module, PyObject *arguments) {
    (void)module;
    int file;
    long long offset, piece, page;
    PyObject *sequence, *result = NULL;
    Py_buffer data, functions, marks;
    if (!PyArg_ParseTuple(arguments, "y*LiLy*OL:write_digested", &functions, &piece, &file, &offset, &data, &sequence,
                          &page))
        return NULL;
    Places places;
    if (functions.len != (Py_ssize_t)sizeof(Hasher))
        PyErr_SetString(PyExc_ValueError, "the addresses of five functions are expected");
    else if (offset < 0 || piece <= 0 || page <= 0)
        PyErr_SetString(PyExc_ValueError, "offsets begin at 0, and sizes above it");
    else if (hold(sequence, PyBUF_SIMPLE, &places) == 0) {
        Target target = {file, data.buf, data.len, offset, piece, page};
        int is_marked = hold_marks(sequence, &places, &marks);
        if (is_marked >= 0)
            result = written(&target, &places, functions.buf);
        if (is_marked > 0)
            PyBuffer_Release(&marks);
        let_go(&places);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&functions);
    return result;
}

static PyObject *digest_places(Source *source, int64_t offset, PyObject *sequence, const Py_buffer *functions) {
    if (functions->len != (Py_ssize_t)sizeof(Hasher)) {
        PyErr_SetString(PyExc_ValueError, "the addresses of five functions are expected");
        return NULL;
    }
    Places places;
    if (hold(sequence, PyBUF_WRITABLE, &places) < 0)
        return NULL;
    PyObject *result = digested(source, offset, &places, functions->buf);
    let_go(&places);
    return result;
}

static PyObject *read_digested(PyObject *module, PyObject *arguments) {
    (void)module;
    int file;
    long long offset;
    PyObject *sequence, *result = NULL;
    Py_buffer functions, pages;
    if (!PyArg_ParseTuple(arguments, "y*iLOw*:read_digested", &functions, &file, &offset, &sequence, &pages))
        return NULL;
    Source source = {file, pages.len ? pages.buf : NULL, pages.len, 0, 0};
    if (pages.len % PAGE)
        PyErr_SetString(PyExc_ValueError, "memory for whole pages is expected");
    else if (offset < 0)
        PyErr_SetString(PyExc_ValueError, "offsets begin at 0");
    else
        result = digest_places(&source, offset, sequence, &functions);
    PyBuffer_Release(&functions);
    PyBuffer_Release(&pages);
    return result;
}

static PyMethodDef methods[] = {
    {"read_digested", read_digested, METH_VARARGS,
     "Fills places of memory from a file, and gives where that ended and the digests of those that are full."},
    {"write_digested", write_digested, METH_VARARGS,
     "Writes memory to a file, and gives the digests of places, which lie in the order of that memory."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_digesting", "Fills many places of memory from a file, or writes them, and takes their digests.",
    0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__digesting(void) { return PyModuleDef_Init(&definition); }
