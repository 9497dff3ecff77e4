"""Wrong data in a Redis: bits flipped, values cut, fields removed, and keys of other types."""

import redis


def damage_some(server, rng, most=20):
    """Damage one thing at each of some keys, at most so many; how many things it was."""
    names = sorted(server.scan_iter(count=1000))
    return sum(_damage(server, name, rng) for name in rng.sample(names, min(most, len(names))))


def _damage(server, name, rng):
    if rng.random() < 0.05:
        lasts_ms = max(1000, server.pttl(name))
        with server.pipeline() as pipeline:
            pipeline.delete(name)
            rng.choice([pipeline.rpush, pipeline.sadd, lambda key, value: pipeline.hset(key, "x", value)])(name, "x")
            pipeline.pexpire(name, lasts_ms)
            pipeline.execute()
        return 1
    try:
        return _DAMAGES[server.type(name)](server, name, rng)
    except (redis.ResponseError, KeyError):  # it has become another one meanwhile, or is gone
        return 0


def _spoilt(value, rng):
    if not value or rng.random() < 0.2:
        return value[: rng.randrange(len(value) + 1)]
    changed = bytearray(value)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _damage_string(server, name, rng):
    value = server.get(name)
    return int(value is not None and bool(server.set(name, _spoilt(value, rng), xx=True, keepttl=True)))


def _damage_hash(server, name, rng):
    field, value = rng.choice(sorted(server.hgetall(name).items()) or [(None, None)])
    if field is None:
        return 0
    if rng.random() < 0.1:
        return server.hdel(name, field)
    server.hset(name, field, _spoilt(value, rng))
    return 1


def _damage_list(server, name, rng):
    length = server.llen(name)
    if not length:
        return 0
    at = rng.randrange(length)
    server.lset(name, at, _spoilt(server.lindex(name, at) or b"", rng))
    return 1


def _damage_ends(server, name, rng):
    server.zadd(name, {rng.randbytes(5): rng.randrange(1 << 45)})
    return 1


_DAMAGES = {b"string": _damage_string, b"hash": _damage_hash, b"list": _damage_list, b"zset": _damage_ends}
