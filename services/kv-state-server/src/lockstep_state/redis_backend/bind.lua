-- Binds a name. KEYS: its hash: d fingerprint of the target, with a checksum, v value. ARGV: fingerprint, value, ttl_ms, whether the target
-- now has to be the one of the next argument, its fingerprint ('': none), a value that counts as none because it is damaged. Returns 1 if it
-- was done, and the value now.
local now = redis.call('HMGET', KEYS[1], 'd', 'v')
local target = plain(now[1])
if not target or now[2] == ARGV[6] then target, now = nil, {} end
if ARGV[4] == '1' and (target or '') ~= ARGV[5] and target ~= ARGV[1] then return {0, now[2] or false} end
redis.call('HSET', KEYS[1], 'd', checked(ARGV[1]), 'v', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1, ARGV[2]}
