"""fp8 e4m3 (the finite kind: no infinity, 448 at most) inside Triton kernels, from and to bytes.

`native` uses the GPU's own conversions (compute capability 8.9 and up). Without it the same values come from integer
and half-precision arithmetic: on older GPUs, and in Triton's interpreter, whose own rounding to fp8 is wrong. Both
round to nearest even and agree with torch bit for bit for what is finite and at most 448.
"""

from functools import cache

import triton
import triton.language as tl

_NATIVE_FROM = 89


@cache
def native() -> bool:
    """Whether this machine's GPU converts fp8 e4m3 itself."""
    return not triton.knobs.runtime.interpret and triton.runtime.driver.active.get_current_target().arch >= _NATIVE_FROM


@triton.jit
def decode(words, dtype: tl.constexpr, native: tl.constexpr):
    """int32 words of four codes each, [m, n], to numbers of `dtype`, [m, 4 * n] (exact in float16 and float32).

    Words are read, because single bytes would be moved to the matrix units' layout one at a time.
    """
    if native:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 lower, upper;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 lower, low;
            cvt.rn.f16x2.e4m3x2 upper, high;
            mov.b32 {$0, $1}, lower;
            mov.b32 {$2, $3}, upper;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        first, second, third, fourth = _half(words), _half(words >> 8), _half(words >> 16), _half(words >> 24)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, (words.shape[0], words.shape[1] * 4)).to(dtype)


@triton.jit
def _half(words):
    """The lowest byte as float16: sign, 4 bits of exponent and 3 of mantissa are moved to float16's fields, whose bias
    is 8 more.
    """
    bits = ((words & 0x80) << 8) | ((words & 0x7F) << 7)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encode(x, native: tl.constexpr):
    """float32 numbers, at most 448 in size, to bytes."""
    if native:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Below 2^-6 the steps are 2^-9: adding 2^14 leaves exactly those bits, rounded by the addition.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    # Above, 20 bits of the mantissa go, a tie to the even neighbour; a carry runs into the exponent, as it should.
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    return (sign | tl.where(size < (127 - 6) << 23, small, large)).to(tl.uint8)
