from libc.stdint cimport uint8_t

cdef extern from *:
    """
    /* As layout.py says for Python. */
    #define HEADRACE_PROPERTIES_NAME "amqp.properties"
    #define HEADRACE_EXCHANGE_NAME "amqp.exchange"
    """
    const char* PROPERTIES_NAME "HEADRACE_PROPERTIES_NAME"
    const char* EXCHANGE_NAME "HEADRACE_EXCHANGE_NAME"
    const Py_ssize_t PROPERTIES_NAME_SIZE "((Py_ssize_t)sizeof(HEADRACE_PROPERTIES_NAME) - 1)"
    const Py_ssize_t EXCHANGE_NAME_SIZE "((Py_ssize_t)sizeof(HEADRACE_EXCHANGE_NAME) - 1)"

cdef enum:
    BAD = -1
    PLAIN = 0
    NEEDS_DECISION = 1      # a property requires a decision by the broker

cdef Py_ssize_t skip_value(const uint8_t* p, const uint8_t* end, int depth) noexcept nogil
cdef int check_properties(const uint8_t* p, const uint8_t* end) noexcept nogil
