-- Reads a stream; with an owner, it takes it under a higher epoch. KEYS as in append.lua. ARGV: owner, ttl_ms, 1 if the
-- pieces are not wanted. Returns the hash, the pieces and the ms that are left of the request's own timeout (-1: it has none, or that is damaged), or 0 if there is none, or 1 if it was damaged; then it is forgotten.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local epoch = number(redis.call('HGET', KEYS[1], 'e'))
if not epoch then
  redis.call('DEL', KEYS[1], KEYS[2])
  return 1
end
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], 'e', checked(epoch + 1), 'o', ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
local time, ends_ms, left_ms = redis.call('TIME'), number(redis.call('HGET', KEYS[1], 'w')), -1
if ends_ms then left_ms = math.max(0, ends_ms - time[1] * 1000 - math.floor(time[2] / 1000)) end
local pieces = ARGV[3] == '1' and {} or redis.call('LRANGE', KEYS[2], 0, -1)
return {redis.call('HGETALL', KEYS[1]), pieces, left_ms}
