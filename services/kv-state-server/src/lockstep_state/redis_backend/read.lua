-- Reads a stream; with an owner, it takes it under a higher epoch. KEYS as in append.lua. ARGV: owner, ttl_ms. Returns the hash and the
-- pieces, or 0 if there is none, or 1 if it was damaged; then it is forgotten.
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
return {redis.call('HGETALL', KEYS[1]), redis.call('LRANGE', KEYS[2], 0, -1)}
