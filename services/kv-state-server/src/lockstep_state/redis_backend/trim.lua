-- Forgets a stream. One that was taken leaves a tombstone, its epoch with a checksum: append.lua refuses writes of lower epochs, so that a router
-- that had it before does not open it again. The first epoch needs none: no write has a lower one. KEYS as in append.lua. ARGV: ttl_ms of
-- the tombstone. Returns 0 if there was none, 1 if there was, 2 if it has left a tombstone.
local epoch = number(redis.pcall('HGET', KEYS[1], 'e'))
if redis.call('DEL', KEYS[1], KEYS[2]) == 0 then return 0 end
if not epoch or epoch <= 1 then return 1 end
-- A Redis that is full forgets streams, and takes no tombstones.
local set = redis.pcall('SET', KEYS[3], checked(epoch), 'PX', ARGV[1])
return set['ok'] and 2 or 1
