-- Writes to one stream, completely or not at all.
-- KEYS: the stream's hash, its list of pieces, the tombstone that it left when it was trimmed. ARGV: epoch, ttl_ms, max_bytes, record, its fingerprints, choices, owner, seal,
-- its fingerprints, bytes after which the tenant's ledger is updated, the life that the stream must have ('': any), the life that it gets if it
-- is opened; ms that are left of the request's own timeout (-1: it has none); then for each piece: choice, position, count, finish, 1 if it has the mark
-- of an inexact continuation, value.
-- The hash: e epoch, d fingerprint of r the record, n choices, o owner, s seal, t its fingerprint, b bytes, q bytes that the
-- ledger knows, c when it is updated again, l<choice> tokens, f<choice> how the choice ended, x<choice> 1 if it has the mark, w when the request's own timeout ends, in ms, i its life: as long as that is the same,
-- tokens are added and none is removed. All but r, o, s and i have a checksum.
-- Returns, as one string, which is sent and parsed faster than an array: outcome (100: some tokens are there already, and have to be compared),
-- epoch, choice, length, bytes if the ledger has to know (-1: none), 1 if what was there was damaged; then it is forgotten.
local OK, STALE, UNKNOWN, GAP, CONFLICT, SEALED, TOO_LARGE, COMPARE = 1, 2, 3, 4, 5, 6, 8, 100
local epoch, ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local is_new, is_damaged = redis.call('EXISTS', KEYS[1]) == 0, false
local head = redis.call('HMGET', KEYS[1], 'e', 'd', 'n', 'b', 'q', 'c', 's', 't', 'i')
local was = {e = number(head[1]), d = plain(head[2]), n = number(head[3]), b = number(head[4]), q = number(head[5]), c = number(head[6])}
if not is_new then is_damaged = not (was.e and was.d and was.n and was.b and was.q and was.c) end
if head[7] and not plain(head[8]) then is_damaged = true end
local logs = {}
for at = 14, #ARGV, 6 do
  local log = redis.call('HMGET', KEYS[1], 'l' .. ARGV[at], 'f' .. ARGV[at], 'x' .. ARGV[at])
  if (log[1] and not number(log[1])) or (log[2] and not number(log[2])) then is_damaged = true end
  logs[at] = {number(log[1]) or 0, log[2], number(log[3])}
end
local function answer(outcome, of_epoch, choice, length, for_ledger)
  -- What was reserved for a stream that is not opened is given back; one that is there keeps it.
  if is_new and ARGV[4] ~= '' and outcome ~= OK and outcome ~= COMPARE then for_ledger = -1 end
  return string.format('%d %.0f %d %d %d %d', outcome, of_epoch or 0, choice or 0, length or 0, for_ledger or 0, is_damaged and 1 or 0)
end
if is_damaged then
  redis.call('DEL', KEYS[1], KEYS[2])
  is_new, head = true, {}
  for _, log in pairs(logs) do log[1], log[2], log[3] = 0, false, nil end
end
if ARGV[11] ~= '' and head[9] ~= ARGV[11] then return answer(COMPARE) end
local bytes, choices, changes, pieces = 0, tonumber(ARGV[6]), {}, {}
local function change(field, value)
  changes[#changes + 1] = field
  changes[#changes + 1] = value
end
if is_new then
  local tombstone = number(redis.pcall('GET', KEYS[3]))
  if tombstone and epoch < tombstone then return answer(STALE, tombstone) end
  if ARGV[4] == '' then return answer(UNKNOWN) end
  change('d', checked(first(ARGV[5])))
  change('r', ARGV[4])
  change('n', checked(choices))
  change('o', ARGV[7])
  change('i', ARGV[12])
  bytes = #ARGV[4]
else
  if epoch < was.e then return answer(STALE, was.e) end
  if ARGV[4] ~= '' and not same(was.d, ARGV[5]) then return answer(CONFLICT) end
  bytes, choices = was.b, was.n
end
local is_sealed = head[7]
for at = 14, #ARGV, 6 do
  local choice, position, count, finish = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), ARGV[at + 3]
  if choice >= choices then return answer(CONFLICT, 0, choice) end
  local length, ended = logs[at][1], logs[at][2]
  local is_longer, is_marked = count > 0 or finish ~= '0', ARGV[at + 4] == '1' and not logs[at][3]
  if position > length then return answer(GAP, 0, choice, length) end
  if position < length or (count == 0 and finish ~= '0' and ended) then return answer(COMPARE, 0, choice, length) end
  if is_longer and ended then return answer(CONFLICT, 0, choice, length) end
  if (is_longer or is_marked) and is_sealed then return answer(SEALED, 0, choice, length) end
  if is_marked then change('x' .. choice, checked(1)) end
  if is_longer then
    change('l' .. choice, checked(length + count))
    if finish ~= '0' then change('f' .. choice, checked(finish)) end
    pieces[#pieces + 1] = ARGV[at + 5]
    bytes = bytes + #ARGV[at + 5]
  end
end
if ARGV[8] ~= '' then
  if is_sealed then
    if not same(plain(head[8]), ARGV[9]) then return answer(SEALED) end
  else
    change('s', ARGV[8])
    change('t', checked(first(ARGV[9])))
    bytes = bytes + #ARGV[8]
  end
end
if bytes > tonumber(ARGV[3]) then return answer(TOO_LARGE) end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local left_ms = tonumber(ARGV[13])
if is_new and left_ms >= 0 then change('w', checked(now_ms + left_ms)) end
local for_ledger = 0
if is_new or ARGV[8] ~= '' or bytes - was.q >= tonumber(ARGV[10]) or now_ms >= was.c then
  for_ledger = bytes
  change('q', checked(bytes))
  change('c', checked(now_ms + ttl_ms / 2))
end
redis.call('HSET', KEYS[1], 'e', checked(epoch), 'b', checked(bytes), unpack(changes))
if is_new then redis.call('DEL', KEYS[2]) end
for _, piece in ipairs(pieces) do redis.call('RPUSH', KEYS[2], piece) end
if not is_sealed then
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  redis.call('PEXPIRE', KEYS[2], ttl_ms)
end
return answer(OK, epoch, 0, 0, for_ledger)
