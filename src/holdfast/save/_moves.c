/* Copies many pieces of memory in one call, of which the larger ones pass by the processor's cache.

   Where a plain copy stores, the processor first reads what it is about to overwrite. A stored line that goes past the
   cache spares that, a third of the traffic; what is copied here is not looked at again before training has gone on.
   The C library does the same, but only from sizes on that single tensors do not have. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, ABREAST = 4, BLOCK = ABREAST * PAGE, AHEAD = 4 * LINE };

static void copy_line(char *target, const char *source) {
    __m128i first = _mm_loadu_si128((const __m128i *)source);
    __m128i second = _mm_loadu_si128((const __m128i *)(source + 16));
    __m128i third = _mm_loadu_si128((const __m128i *)(source + 32));
    __m128i fourth = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)target, first);
    _mm_stream_si128((__m128i *)(target + 16), second);
    _mm_stream_si128((__m128i *)(target + 32), third);
    _mm_stream_si128((__m128i *)(target + 48), fourth);
}

/* Four pages abreast: the memory has more to do at a time than with one after the other. */
static void copy_past_cache(char *target, const char *source, size_t size) {
    size_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    memcpy(target, source, head);
    target += head, source += head, size -= head;
    for (; size >= BLOCK; target += BLOCK, source += BLOCK, size -= BLOCK) {
        for (size_t line = 0; line < PAGE; line += LINE) {
            for (size_t page = 0; page < BLOCK; page += PAGE) {
                _mm_prefetch(source + page + line + AHEAD, _MM_HINT_T0);
                copy_line(target + page + line, source + page + line);
            }
        }
    }
    memcpy(target, source, size);
    /* Such stores may be seen in another order than they were made in, unless one waits for them. */
    _mm_sfence();
}

static void copy_piece(char *target, const char *source, size_t size) {
    if (size >= BLOCK + LINE)
        copy_past_cache(target, source, size);
    else
        memcpy(target, source, size);
}
#else
static void copy_piece(char *target, const char *source, size_t size) { memcpy(target, source, size); }
#endif

static PyObject *copy(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer targets, sources, sizes;
    if (!PyArg_ParseTuple(arguments, "y*y*y*:copy", &targets, &sources, &sizes))
        return NULL;
    int fits = targets.len == sources.len && targets.len == sizes.len && targets.len % (Py_ssize_t)sizeof(uint64_t) == 0;
    if (fits) {
        const uint64_t *to = targets.buf, *from = sources.buf, *size = sizes.buf;
        size_t count = (size_t)targets.len / sizeof(uint64_t);
        Py_BEGIN_ALLOW_THREADS
        for (size_t piece = 0; piece < count; piece++)
            copy_piece((char *)(uintptr_t)to[piece], (const char *)(uintptr_t)from[piece], (size_t)size[piece]);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&targets);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&sizes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the three arrays must have as many numbers of eight bytes each");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "Copies pieces of memory, given where to, where from and how many bytes."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_moves", "Copies many pieces of memory in one call.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__moves(void) { return PyModuleDef_Init(&definition); }
