/* The few functions of Python's stable ABI that are needed to read its lists, declared by hand: no headers of Python
 * have to be installed. A step of 256 rows with a known tree takes 6 us here; in Python, to compare its tables and
 * their last ids with those of the step before takes 17 alone.
 *
 * Each sets a Python exception where it fails, which ctypes.PyDLL raises after the call. */
#ifndef RAMET_PYTHON_H
#define RAMET_PYTHON_H

#include <stdint.h>

typedef struct _object PyObject;

extern PyObject *PyExc_AssertionError, *PyExc_ValueError;
intptr_t PyList_Size(PyObject *list);
PyObject *PyList_GetItem(PyObject *list, intptr_t index); /* borrowed, as all that is not said to be new */
PyObject *PySequence_GetItem(PyObject *sequence, intptr_t index); /* new */
void Py_DecRef(PyObject *object);
long PyLong_AsLong(PyObject *number);
PyObject *PyErr_Occurred(void);
PyObject *PyErr_NoMemory(void);
void PyErr_SetString(PyObject *type, const char *message);

/* Numbers that come in are at most so large: multiples of blocks and tiles past them still fit 32 bits. */
#define MAX_NUMBER (1 << 30)

/* The number, or -1 with an exception. */
static inline int32_t int_of(PyObject *object)
{
    long number = object ? PyLong_AsLong(object) : -1;
    if (number >= 0 && number <= MAX_NUMBER)
        return (int32_t)number;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a block id, a length or a depth is negative or above 2^30");
    return -1;
}

#endif
