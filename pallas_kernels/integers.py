from tca_jax.pallas_kernels.tiles import round_up as round_up


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
