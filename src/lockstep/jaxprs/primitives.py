"""JAX's operations of one kind, by their names in a jaxpr.

Whoever reads jaxprs here asks the same list; names that only some versions of JAX know
do no harm.
"""

# Number i of the result comes from number i of every input that is no scalar, and from
# nothing else. Each has one result.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic
    lt max min mul ne neg nextafter not one_minus_square or population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor""".split()
)

# Random numbers from a key, which is the first input; their array is the last result.
KEYED_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})

# Random numbers from a state of the device itself: other ones on each device, and in
# each call.
KEYLESS_DRAWS = frozenset({"rng_uniform"})

# All that may be random numbers. A hash is not always: keys are derived by it as well.
DRAWS = KEYED_DRAWS | KEYLESS_DRAWS | {"threefry2x32"}
