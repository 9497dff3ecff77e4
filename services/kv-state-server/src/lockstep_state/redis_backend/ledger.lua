-- What a tenant has: a reservation for each of its streams, tombstones and names, or of its blocks, which ends by itself. KEYS: sorted set of members by the end of
-- their time in ms, hash of their bytes ('#': of all, '$': number of streams, both with a checksum). ARGV: member, bytes (-1: remove it), ttl_ms,
-- greatest bytes and greatest number of streams ('': reserve whatever they are). Members that are streams begin with s. Returns 1, or 0 if
-- refused. Damaged sums are forgotten with all that they count.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local sums = redis.call('HMGET', KEYS[2], '#', '$')
local total, streams = number(sums[1]), number(sums[2])
if not (total and streams) then
  if redis.call('EXISTS', KEYS[1], KEYS[2]) > 0 then redis.call('DEL', KEYS[1], KEYS[2]) end
  total, streams = 0, 0
end
local function remove(member)
  local bytes = redis.call('HGET', KEYS[2], member)
  redis.call('ZREM', KEYS[1], member)
  if bytes then
    redis.call('HDEL', KEYS[2], member)
    total = math.max(0, total - (tonumber(bytes) or 0))
    if string.sub(member, 1, 1) == 's' then streams = math.max(0, streams - 1) end
  end
end
local function keep_sums() redis.call('HSET', KEYS[2], '#', checked(total), '$', checked(streams)) end
local expired = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, 100)
for _, member in ipairs(expired) do remove(member) end
if #expired > 0 then keep_sums() end
local member, bytes, ttl_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local is_stream = string.sub(member, 1, 1) == 's'
if bytes < 0 then
  if redis.call('HEXISTS', KEYS[2], member) == 1 then
    remove(member)
    keep_sums()
  end
  return 1
end
local old = redis.call('HGET', KEYS[2], member)
local old_bytes = tonumber(old or 0) or 0
local others = math.max(0, total - old_bytes)
if ARGV[4] ~= '' then
  -- A stream is reserved with its record, also if it is opened again: what it has besides is known here already.
  if is_stream then bytes = math.max(bytes, old_bytes) end
  if bytes > old_bytes and others + bytes > tonumber(ARGV[4]) then return 0 end
  if is_stream and not old and streams >= tonumber(ARGV[5]) then return 0 end
end
total = others + bytes
if is_stream and not old then streams = streams + 1 end
redis.call('HSET', KEYS[2], member, bytes)
keep_sums()
redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ttl_ms), member)
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < ttl_ms then redis.call('PEXPIRE', key, ttl_ms) end
end
return 1
