-- What a script decides by has a checksum, "7 902ba3cd": what was changed in Redis is not taken for something else. This is before every
-- script.
local function checked(value)
  if type(value) == 'number' then value = string.format('%.0f', value) end
  return value .. ' ' .. string.sub(redis.sha1hex(value), 1, 8)
end
local function plain(text)
  if not text or #text < 9 then return nil end
  local value = string.sub(text, 1, -10)
  if checked(value) ~= text then return nil end
  return value
end
-- Of fingerprints with several keys the first is stored, and any counts as the same.
local function first(fingerprints) return string.sub(fingerprints, 1, 32) end
local function same(stored, fingerprints)
  return stored and #stored == 32 and string.find(fingerprints, stored, 1, true) ~= nil
end
local function number(text) return tonumber(plain(text) or '') end
