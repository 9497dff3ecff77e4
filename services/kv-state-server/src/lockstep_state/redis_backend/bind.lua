-- Binds a name. KEYS: its hash: d fingerprint of the target, with a checksum, v value. ARGV: fingerprints, value, ttl_ms, whether the target
-- now has to be the one of the next argument, its fingerprints ('': none), a value that counts as none because it is damaged. Returns 1 if it
-- was done, the value now, and if it was not done for how many ms that is kept.
local now = redis.call('HMGET', KEYS[1], 'd', 'v')
local target = plain(now[1])
if not target or now[2] == ARGV[6] then target, now = nil, {} end
local as_expected = ARGV[4] ~= '1' or same(target, ARGV[5]) or (not target and ARGV[5] == '')
if not as_expected and not same(target, ARGV[1]) then return {0, now[2] or false, redis.call('PTTL', KEYS[1])} end
redis.call('HSET', KEYS[1], 'd', checked(first(ARGV[1])), 'v', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1, ARGV[2], 0}
