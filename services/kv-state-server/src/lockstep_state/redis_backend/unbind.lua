-- Forgets a name. KEYS: its hash. ARGV: fingerprints of the target that it has to have ('': any). Returns 1 if it was done.
local now = plain(redis.call('HGET', KEYS[1], 'd'))
if not now or (ARGV[1] ~= '' and not same(now, ARGV[1])) then return 0 end
return redis.call('DEL', KEYS[1])
