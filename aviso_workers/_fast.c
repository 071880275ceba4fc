/* The functions of `_fast.py` in C: the same arguments, the same results. What is not plain they leave to Python, in
   the same way as those do. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <datetime.h>
#include <string.h>

#define MAX_DIGITS 9 /* of the id of a subscription and of the sizes of a message */
#define SHORT_DIGITS 19 /* so many digits always fit into 64 bits */
#define WORDS 5
#define NUMBERS 5

typedef struct {
    const char *begin, *end;
} Word;

typedef struct {
    Word subject, reply, headers, data;
    Py_ssize_t sid, size;
    const char *end; /* of the command */
} Arrival;

static int is_digits(Word word) {
    const char *at;
    for (at = word.begin; at < word.end; at++)
        if (*at < '0' || *at > '9') return 0;
    return word.end > word.begin;
}

static int small_number(Word word, Py_ssize_t *number) {
    const char *at;
    if (word.end - word.begin > MAX_DIGITS || !is_digits(word)) return 0;
    for (*number = 0, at = word.begin; at < word.end; at++) *number = *number * 10 + (*at - '0');
    return 1;
}

static const char *line_end(const char *at, const char *end) {
    while (at < end && (at = memchr(at, '\r', end - at))) {
        if (at + 1 < end && at[1] == '\n') return at;
        at++;
    }
    return NULL;
}

/* Reads a whole message with good numbers; returns 0 for anything else. */
static int read_arrival(const char *at, const char *end, Arrival *found) {
    Word words[WORDS];
    int count = 0, with_headers = end - at > 5 && !memcmp(at, "HMSG ", 5), place;
    const char *last, *space;
    Py_ssize_t head = 0;

    if (!with_headers && (end - at < 5 || memcmp(at, "MSG ", 4))) return 0;
    at += 4 + with_headers;
    if (!(last = line_end(at, end))) return 0;
    do {
        if (count == WORDS) return 0;
        space = memchr(at, ' ', last - at);
        words[count++] = (Word){at, space ? space : last};
        at = words[count - 1].end + 1;
    } while (space);
    place = count - 1 - with_headers; /* where the sizes begin */
    if (place != 2 && place != 3) return 0;
    found->subject = words[0];
    found->reply = place == 3 ? words[2] : (Word){last, last};
    if (!small_number(words[1], &found->sid) || !small_number(words[count - 1], &found->size)) return 0;
    if (with_headers && !small_number(words[place], &head)) return 0;
    if (head > found->size || end - (last + 2) < found->size + 2) return 0;
    found->headers = (Word){last + 2, last + 2 + head};
    found->data = (Word){last + 2 + head, last + 2 + found->size};
    found->end = found->data.end + 2;
    return 1;
}

static PyObject *bytes_of(Word word) { return PyBytes_FromStringAndSize(word.begin, word.end - word.begin); }

/* Takes the items over, also where it fails because one of them is NULL. */
static PyObject *tuple_of(PyObject **items, Py_ssize_t count) {
    Py_ssize_t place, missing = 0;
    PyObject *made;
    for (place = 0; place < count; place++) missing += !items[place];
    made = missing ? NULL : PyTuple_New(count);
    for (place = 0; place < count; place++) {
        if (made)
            PyTuple_SET_ITEM(made, place, items[place]);
        else
            Py_XDECREF(items[place]);
    }
    return made;
}

/* Appends what it takes over; returns 0 where it fails. */
static int append(PyObject *list, PyObject *item) {
    int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return !failed;
}

static PyObject *split(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Py_ssize_t begin, sid = -1, size = 0;
    const char *data, *at, *end;
    PyObject *arrivals;
    Arrival found;

    if (count != 2 || !PyBytes_Check(arguments[0]) || !PyLong_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "split(data: bytes, begin: int)");
        return NULL;
    }
    data = PyBytes_AS_STRING(arguments[0]);
    end = data + PyBytes_GET_SIZE(arguments[0]);
    begin = PyLong_AsSsize_t(arguments[1]);
    if (begin < 0 || begin > end - data) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "begin is outside of the data");
        return NULL;
    }
    if (!(arrivals = PyList_New(0))) return NULL;
    for (at = data + begin; read_arrival(at, end, &found) && (sid < 0 || sid == found.sid); at = found.end) {
        PyObject *parts[] = {
            bytes_of(found.subject), bytes_of(found.reply), bytes_of(found.headers), bytes_of(found.data)};
        if (!append(arrivals, tuple_of(parts, 4))) {
            Py_DECREF(arrivals);
            return NULL;
        }
        sid = found.sid;
        size += found.size;
    }
    return Py_BuildValue("nNnn", sid, arrivals, (Py_ssize_t)(at - data), size);
}

static PyObject *number_of(Word word) {
    unsigned long long number = 0;
    PyObject *text, *made;
    const char *at;
    if (word.end - word.begin <= SHORT_DIGITS) {
        for (at = word.begin; at < word.end; at++) number = number * 10 + (unsigned)(*at - '0');
        return PyLong_FromUnsignedLongLong(number);
    }
    if (!(text = PyUnicode_FromStringAndSize(word.begin, word.end - word.begin))) return NULL;
    made = PyLong_FromUnicodeObject(text, 10);
    Py_DECREF(text);
    return made;
}

/* Reads the numbers of a reply subject; returns 0 where they are not numbers. */
static int read_numbers(const char *at, const char *end, Word *numbers) {
    int place;
    for (place = 0; place < NUMBERS; place++) {
        const char *dot = at <= end ? memchr(at, '.', end - at) : NULL;
        if (at > end) return 0;
        numbers[place] = (Word){at, dot ? dot : end};
        if (!is_digits(numbers[place])) return 0;
        at = numbers[place].end + 1;
    }
    return 1;
}

static PyObject *stored(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *arrivals, *found, *own;
    Py_ssize_t place, begin;

    if (count != 2 || !PyBytes_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "stored(arrivals, own: bytes)");
        return NULL;
    }
    own = arguments[1];
    begin = PyBytes_GET_SIZE(own);
    if (!(arrivals = PySequence_Fast(arguments[0], "arrivals must be a sequence"))) return NULL;
    if (!(found = PyList_New(0))) goto end;
    for (place = 0; place < PySequence_Fast_GET_SIZE(arrivals); place++) {
        PyObject *subject, *reply, *headers, *data, *arrival = PySequence_Fast_GET_ITEM(arrivals, place);
        Word numbers[NUMBERS];
        const char *text;
        Py_ssize_t length;
        if (!PyTuple_Check(arrival) || PyTuple_GET_SIZE(arrival) != 4 || !PyBytes_Check(PyTuple_GET_ITEM(arrival, 0)) ||
            !PyBytes_Check(PyTuple_GET_ITEM(arrival, 1))) {
            PyErr_SetString(PyExc_TypeError, "an arrival is a tuple of subject, reply, headers and data");
            goto failed;
        }
        subject = PyTuple_GET_ITEM(arrival, 0);
        reply = PyTuple_GET_ITEM(arrival, 1);
        headers = PyTuple_GET_ITEM(arrival, 2);
        data = PyTuple_GET_ITEM(arrival, 3);
        text = PyBytes_AS_STRING(reply);
        length = PyBytes_GET_SIZE(reply);
        if (length < begin || memcmp(text, PyBytes_AS_STRING(own), begin) ||
            !read_numbers(text + begin, text + length, numbers))
            continue;
        Py_INCREF(reply);
        Py_INCREF(headers);
        Py_INCREF(data);
        PyObject *parts[] = {
            PyUnicode_DecodeUTF8(PyBytes_AS_STRING(subject), PyBytes_GET_SIZE(subject), "replace"),
            reply,
            headers,
            data,
            number_of(numbers[0]),
            number_of(numbers[1]),
            number_of(numbers[2]),
            number_of(numbers[3]),
            number_of(numbers[4])};
        if (!append(found, tuple_of(parts, 4 + NUMBERS))) goto failed;
    }
end:
    Py_DECREF(arrivals);
    return found;
failed:
    Py_DECREF(found);
    Py_DECREF(arrivals);
    return NULL;
}

static PyObject *identifier(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PyObject *subject, *base, *keys, *found;
    Py_ssize_t at, end, place, dot;

    if (count != 3 || !PyUnicode_Check(arguments[0]) || !PyUnicode_Check(arguments[1]) || !PyTuple_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "identifier(subject: str, base: str, keys: tuple)");
        return NULL;
    }
    subject = arguments[0];
    base = arguments[1];
    keys = arguments[2];
    end = PyUnicode_GET_LENGTH(subject);
    at = PyUnicode_GET_LENGTH(base);
    if (at > end || (at < end && PyUnicode_READ_CHAR(subject, at) != '.') ||
        PyUnicode_Tailmatch(subject, base, 0, end, -1) != 1 ||
        PyUnicode_FindChar(subject, '%', 0, end, 1) != -1)
        Py_RETURN_NONE;
    if (!(found = PyDict_New())) return NULL;
    for (place = 0; place < PyTuple_GET_SIZE(keys); place++) {
        PyObject *value;
        int failed;
        if (++at > end) goto odd;
        dot = PyUnicode_FindChar(subject, '.', at, end, 1);
        if (dot < 0) dot = end;
        if (dot == at || (dot == at + 1 && PyUnicode_READ_CHAR(subject, at) == '*')) goto odd;
        value = PyUnicode_Substring(subject, at, dot);
        failed = !value || PyDict_SetItem(found, PyTuple_GET_ITEM(keys, place), value);
        Py_XDECREF(value);
        if (failed) {
            Py_DECREF(found);
            return NULL;
        }
        at = dot;
    }
    if (at == end) return found;
odd:
    Py_DECREF(found);
    Py_RETURN_NONE;
}

static PyObject *stored_at(PyObject *module, PyObject *nanoseconds) {
    /* Days to a date of the Gregorian calendar, in years that begin in March: leap days are the last of a year. */
    long long time = PyLong_AsLongLong(nanoseconds), microseconds, seconds, days, era;
    int of_day, day_of_era, year, day, month;
    if (time == -1 && PyErr_Occurred()) return NULL;
    microseconds = time / 1000 - (time % 1000 < 0);
    seconds = microseconds / 1000000 - (microseconds % 1000000 < 0);
    microseconds -= seconds * 1000000;
    days = seconds / 86400 - (seconds % 86400 < 0);
    of_day = (int)(seconds - days * 86400);
    days += 719468; /* from the first of March of the year 0 on */
    era = days / 146097;
    day_of_era = (int)(days % 146097);
    year = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    day = day_of_era - (365 * year + year / 4 - year / 100);
    month = (5 * day + 2) / 153;
    day -= (153 * month + 2) / 5 - 1;
    month += month < 10 ? 3 : -9;
    year += (int)(era * 400) + (month <= 2);
    return PyDateTimeAPI->DateTime_FromDateAndTime(
        year, month, day, of_day / 3600, of_day / 60 % 60, of_day % 60, (int)microseconds,
        PyDateTime_TimeZone_UTC, PyDateTimeAPI->DateTimeType);
}

static PyMethodDef methods[] = {
    {"split", (PyCFunction)(void (*)(void))split, METH_FASTCALL, NULL},
    {"stored", (PyCFunction)(void (*)(void))stored, METH_FASTCALL, NULL},
    {"identifier", (PyCFunction)(void (*)(void))identifier, METH_FASTCALL, NULL},
    {"stored_at", stored_at, METH_O, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fast_c", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast_c(void) {
    PyDateTime_IMPORT;
    return PyDateTimeAPI ? PyModule_Create(&definition) : NULL;
}
