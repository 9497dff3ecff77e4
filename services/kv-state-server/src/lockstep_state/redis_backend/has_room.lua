-- Whether the server of a block's key has room for the block besides what is kept for journals. KEYS: the block's. ARGV: its bytes, the part of
-- maxmemory that may be in use with it. Returns 1 if there is room, 0 if not, -1 if the user may not ask for it; and 1 if the block is there, whose
-- room the new value takes, or 0.
local old = redis.pcall('STRLEN', KEYS[1])
if type(old) ~= 'number' then old = 0 end
local is_there = old > 0 and 1 or 0
local info = redis.pcall('INFO', 'memory')
if type(info) ~= 'string' then return {-1, is_there} end
local used, limit = tonumber(string.match(info, 'used_memory:(%d+)')), tonumber(string.match(info, 'maxmemory:(%d+)'))
return {(limit == 0 or used - old + ARGV[1] <= limit * ARGV[2]) and 1 or 0, is_there}
