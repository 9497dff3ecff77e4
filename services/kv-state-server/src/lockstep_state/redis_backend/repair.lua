-- Keeps a stream up to its first damaged piece. KEYS as in append.lua. ARGV: the record and the number of pieces that were seen, the
-- number to keep (-1: the record is damaged, nothing is kept), 1 if the seal is kept, its new life; then for each choice: tokens, how it ended ('': not).
if (redis.call('HGET', KEYS[1], 'r') or '') ~= ARGV[1] or redis.call('LLEN', KEYS[2]) ~= tonumber(ARGV[2]) then return 0 end
local keep = tonumber(ARGV[3])
if keep < 0 then return redis.call('DEL', KEYS[1], KEYS[2]) end
if keep == 0 then redis.call('DEL', KEYS[2]) else redis.call('LTRIM', KEYS[2], 0, keep - 1) end
if ARGV[4] ~= '1' then redis.call('HDEL', KEYS[1], 's', 't') end
redis.call('HSET', KEYS[1], 'i', ARGV[5])
for at = 6, #ARGV, 2 do
  local choice = (at - 6) / 2
  redis.call('HSET', KEYS[1], 'l' .. choice, checked(ARGV[at]))
  if ARGV[at + 1] == '' then
    redis.call('HDEL', KEYS[1], 'f' .. choice)
  else
    redis.call('HSET', KEYS[1], 'f' .. choice, checked(ARGV[at + 1]))
  end
end
return 1
