-- One operation on a lease. KEYS: its hash: o owner, e epoch, u its end in ms, each with a checksum; one that is damaged counts as none. ARGV:
-- acquire, renew, release or look_up; owner, epoch, ttl_ms, ms for which it is remembered after its end. Returns 1 if it was done, owner,
-- epoch, ms until its end.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'o', 'e', 'u')
local owner, epoch, until_ms = plain(held[1]), number(held[2]), number(held[3])
if not (owner and epoch and until_ms) then owner, epoch, until_ms = '', 0, 0 end
if until_ms <= now_ms then owner = '' end
local operation, ttl_ms, done = ARGV[1], tonumber(ARGV[4]), 0
local function set(new_owner, new_epoch, lasts_ms)
  owner, epoch, until_ms, done = new_owner, new_epoch, now_ms + lasts_ms, 1
  redis.call('HSET', KEYS[1], 'o', checked(owner), 'e', checked(epoch), 'u', checked(until_ms))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', lasts_ms + ARGV[5]))
end
if operation == 'acquire' then
  if owner == '' or owner == ARGV[2] then set(ARGV[2], math.max(epoch + 1, now_ms), ttl_ms) end
elseif operation == 'look_up' then
  if owner ~= '' then done = 1 end
elseif owner ~= '' and owner == ARGV[2] and epoch == tonumber(ARGV[3]) then
  if operation == 'renew' then set(owner, epoch, ttl_ms) else set('', epoch, 0) end
end
if owner == '' then until_ms = now_ms end
return {done, owner, epoch, until_ms - now_ms}
