"""The scripts of a Redis log: each is one step for everybody, and writes nothing before all of it was checked.

A script is atomic for readers and after a crash, but not where it fails: what it wrote before stays. So everything
that could make a command fail is looked at first, types of keys included; and none runs long, because the server does
nothing else meanwhile. Numbers go through as text: Lua has floating point only.

`agent_saga_core.log.redis.schema` says what the keys hold.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

__all__ = [
    "ADOPT",
    "APPEND",
    "CENSUS",
    "FORGET",
    "INIT",
    "LOOK",
    "LOSE",
    "REGISTER",
    "RELEASE",
    "RENEW",
    "RETIRE",
    "RIGHTS",
    "STAGE",
    "SWEEP",
    "TAKE",
    "Script",
]


class Script:
    """A script, and the name that the server knows it by once it has seen it."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text: Final = text.encode()
        # The server's name for it, which has nothing to do with security.
        self.sha: Final = sha1(self.text, usedforsecurity=False).hexdigest().encode()


_CALL: Final = """
local call = redis.call
"""

_NOW: Final = """
local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

# The shared keys: 1 log, 2 sagas, 3 open, 4 ended, 5 empty. A key of another type raises here, before the first write.
# The writer is key 6: what it was acknowledged must be there still.
_WRITER: Final = (
    _CALL
    + """
local log = call('HMGET', KEYS[1], 'id', 'seq')
local seq = tonumber(log[2])
if log[1] ~= ARGV[1] or not seq then return {'another'} end
for at = 2, 5 do call('ZCARD', KEYS[at]) end
local writer = call('HMGET', KEYS[6], 'fenced', 'count')
local count = tonumber(writer[2])
if not count then return {'missing'} end
if count < tonumber(ARGV[2]) then return {'behind'} end
if writer[1] ~= '0' then return {'fenced'} end
local me = ARGV[3]
"""
)

APPEND: Final = Script(
    _WRITER
    + """
local at, answers, todo = 4, {}, {}
for key = 7, #KEYS, 2 do
  local saga, records = KEYS[key], KEYS[key + 1]
  local id, fresh, epoch, first, next, ended, many = unpack(ARGV, at, at + 6)
  local row = redis.pcall('HMGET', saga, 'owner', 'epoch', 'next')
  local length = redis.pcall('LLEN', records)
  local answer = 'n'
  if row.err or type(length) ~= 'number' then
    answer = 'd'
  elseif fresh == '1' then
    if not row[3] then answer = length == 0 and 'y' or 'd' end
  elseif row[1] == me and row[2] == epoch and row[3] == first then
    answer = length == tonumber(first) - 1 and 'y' or 'd'
  end
  answers[#answers + 1] = answer
  many = tonumber(many)
  if answer == 'y' then todo[#todo + 1] = {saga, records, id, fresh, epoch, first, next, ended, at + 7, many} end
  at = at + 7 + many
end
for _, one in ipairs(todo) do
  local saga, records, id, fresh, epoch, first, next, ended, from, many = unpack(one)
  for part = from, from + many - 1, 1000 do
    call('RPUSH', records, unpack(ARGV, part, math.min(part + 999, from + many - 1)))
  end
  local owner = ended == '' and me or ''
  if first == '1' then
    seq = seq + 1
    call('HSET', KEYS[1], 'seq', string.format('%.0f', seq))
    call('HSET', saga, 'seq', string.format('%.0f', seq), 'epoch', epoch, 'next', next, 'owner', owner)
    call('ZADD', KEYS[2], seq, id)
    if ended == '' then call('ZADD', KEYS[3], seq, id) end
    if fresh == '0' then call('ZREM', KEYS[5], id) end
  elseif ended == '' then
    call('HSET', saga, 'next', next)
  else
    call('HSET', saga, 'next', next, 'owner', owner)
  end
  if ended ~= '' then
    call('HSET', saga, 'ended', ended)
    call('ZREM', KEYS[3], id)
    call('ZADD', KEYS[4], ended, id)
  end
end
if #todo > 0 then count = call('HINCRBY', KEYS[6], 'count', 1) end
return {'ok', count, table.concat(answers)}
"""
)
"""Store the records of several sagas, each if it is where its writer knows it to be."""

TAKE: Final = Script(
    _WRITER
    + _NOW
    + """
local saga, records, old = KEYS[7], KEYS[8], KEYS[9]
local id, owner, epoch, next, mine, new_epoch, new_next, body, turn = unpack(ARGV, 4, 12)
local row = redis.pcall('HMGET', saga, 'owner', 'epoch', 'next', 'ended', 'turn')
local length = redis.pcall('LLEN', records)
if row.err or type(length) ~= 'number' then return {'damaged'} end
local function read_back()
  return {'taken', count, call('HGET', saga, 'next'), call('LINDEX', records, -1)}
end
-- By an earlier try of this one, whose answer was lost.
if row[1] == me and row[2] == new_epoch and row[3] == new_next and row[5] == turn then return read_back() end
if row[4] or (row[1] or '') ~= owner or (row[2] or '') ~= epoch or (row[3] or '') ~= next then return {'changed'} end
if length ~= (tonumber(next) or 1) - 1 then return {'changed'} end
local fence = false
if owner ~= '' and owner ~= me and mine == '0' then
  local other = call('HMGET', old, 'fenced', 'until')
  if other[1] == '0' then
    if tonumber(other[2]) >= now() then return {'busy'} end
    fence = true
  end
end
if fence then call('HSET', old, 'fenced', '1') end
if body ~= '' then call('RPUSH', records, body) end
call('HSET', saga, 'owner', me, 'epoch', new_epoch, 'next', new_next, 'turn', turn)
if next == '' then call('ZADD', KEYS[5], now(), id) end
count = call('HINCRBY', KEYS[6], 'count', 1)
return read_back()
"""
)
"""Own a saga that is as it was seen: fence who had it, append the CLAIM, and read back what is there then."""

RELEASE: Final = Script(
    _CALL
    + """
local row = redis.pcall('HMGET', KEYS[1], 'owner', 'epoch', 'next', 'ended', 'turn')
call('ZCARD', KEYS[2])
if row.err or row[1] ~= ARGV[2] or row[2] ~= ARGV[3] or row[4] or (row[5] or '0') ~= ARGV[4] then return 0 end
if row[3] == '1' then
  call('DEL', KEYS[1])
  call('ZREM', KEYS[2], ARGV[1])
else
  call('HSET', KEYS[1], 'owner', '')
end
return 1
"""
)
"""Give a saga back; its row goes if nothing was begun."""

LOOK: Final = Script(
    _CALL
    + _NOW
    + """
local row = redis.pcall('HMGET', KEYS[1], 'seq', 'epoch', 'next', 'owner', 'ended')
local length = redis.pcall('LLEN', KEYS[2])
if row.err or type(length) ~= 'number' then return {'damaged'} end
local alive = 0
if row[4] and row[4] ~= '' then
  local writer = call('HMGET', ARGV[1] .. row[4], 'fenced', 'until')
  if writer[1] == '0' and tonumber(writer[2]) >= now() then alive = 1 end
end
return {'row', row[1], row[2], row[3], row[4], row[5], length, alive}
"""
)
"""The row of a saga, how many records it has, and whether the lease of its owner runs."""

CENSUS: Final = Script(
    _CALL
    + """
local found = {}
for at = 4, #KEYS, 2 do
  local id = ARGV[at / 2 - 1]
  local row = redis.pcall('HMGET', KEYS[at], 'seq', 'epoch', 'next', 'owner', 'ended')
  local length = redis.pcall('LLEN', KEYS[at + 1])
  if row.err or type(length) ~= 'number' then
    found[#found + 1] = {'damaged'}
  else
    found[#found + 1] = {
      'row', row[1], row[2], row[3], row[4], row[5], length, 0,
      call('ZSCORE', KEYS[1], id), call('ZSCORE', KEYS[2], id), call('ZSCORE', KEYS[3], id),
    }
  end
end
return found
"""
)
"""The rows of some sagas, with their places in `sagas`, `open` and `ended`."""

REGISTER: Final = Script(
    _CALL
    + _NOW
    + """
if call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
call('ZCARD', KEYS[2])
call('HLEN', KEYS[3])
local ends = string.format('%.0f', now() + ARGV[3])
call('HSET', KEYS[3], 'until', ends, 'fenced', '0', 'count', '0')
call('ZADD', KEYS[2], ends, ARGV[2])
return 1
"""
)
"""Begin the lease of a writer that nothing was acknowledged to yet."""

RENEW: Final = Script(
    _CALL
    + _NOW
    + """
call('ZCARD', KEYS[1])
local ends, answers, good = string.format('%.0f', now() + ARGV[1]), {}, {}
for at = 2, #KEYS do
  local nonce, acknowledged = ARGV[at * 2 - 2], ARGV[at * 2 - 1]
  local row = call('HMGET', KEYS[at], 'fenced', 'count')
  local count = tonumber(row[2])
  if not count then answers[at - 1] = 'missing'
  elseif count < tonumber(acknowledged) then answers[at - 1] = 'behind'
  elseif row[1] ~= '0' then answers[at - 1] = 'fenced'
  else
    answers[at - 1] = 'ok'
    good[#good + 1] = {KEYS[at], nonce}
  end
end
for _, one in ipairs(good) do
  call('HSET', one[1], 'until', ends)
  call('ZADD', KEYS[1], ends, one[2])
end
return answers
"""
)
"""Begin the leases of these writers anew, of each that is still what it knows itself to be."""

RETIRE: Final = Script(
    _CALL
    + """
call('ZCARD', KEYS[1])
for at = 2, #KEYS do
  call('DEL', KEYS[at])
  call('ZREM', KEYS[1], ARGV[at - 1])
end
return 1
"""
)
"""End these writers."""

LOSE: Final = Script(
    _CALL
    + """
local log = call('HMGET', KEYS[1], 'id', 'seq')
local seq = tonumber(log[2])
for at = 2, 4 do call('ZCARD', KEYS[at]) end
if log[1] ~= ARGV[1] or not seq then return 0 end
local me, id, epoch, next = unpack(ARGV, 2, 5)
local row = call('HMGET', KEYS[5], 'owner', 'next', 'seq')
local there = tonumber(row[2])
if there and there >= tonumber(next) then return 0 end
if there and row[1] ~= me and row[1] ~= '' then return 0 end
if row[3] then
  call('HSET', KEYS[5], 'next', next, 'owner', '')
else
  seq = seq + 1
  call('HSET', KEYS[1], 'seq', string.format('%.0f', seq))
  call('HSET', KEYS[5], 'seq', string.format('%.0f', seq), 'epoch', epoch, 'next', next, 'owner', '')
  call('ZADD', KEYS[2], seq, id)
  call('ZADD', KEYS[3], seq, id)
  call('ZREM', KEYS[4], id)
end
return 1
"""
)
"""Leave word that a saga had more records than are here: nobody shall take what is left for all of it."""

FORGET: Final = Script(
    _CALL
    + """
if call('GET', KEYS[1]) ~= ARGV[1] then return {'taken'} end
for at = 2, 3 do call('ZCARD', KEYS[at]) end
local todo, gone = {}, {}
for key = 4, #KEYS, 2 do
  local at = 3 + (key - 4) / 2 * 4
  local id, seq, ended, many = unpack(ARGV, at, at + 3)
  local row = call('HMGET', KEYS[key], 'seq', 'ended')
  if row[1] == seq and row[2] == ended and call('LLEN', KEYS[key + 1]) == tonumber(many) then
    todo[#todo + 1] = {KEYS[key], KEYS[key + 1], id}
    gone[#gone + 1] = id
  end
end
for _, one in ipairs(todo) do
  call('UNLINK', one[1], one[2])
  call('ZREM', KEYS[2], one[3])
  call('ZREM', KEYS[3], one[3])
end
if ARGV[2] == '0' then call('DEL', KEYS[1]) else call('PEXPIRE', KEYS[1], ARGV[2]) end
return {'ok', gone}
"""
)
"""Forget sagas that are still as they were seen, if this is the compaction that may."""

STAGE: Final = Script(
    _CALL
    + """
if call('LLEN', KEYS[1]) ~= tonumber(ARGV[2]) then return call('LLEN', KEYS[1]) end
for part = 3, #ARGV, 1000 do call('RPUSH', KEYS[1], unpack(ARGV, part, math.min(part + 999, #ARGV))) end
call('PEXPIRE', KEYS[1], ARGV[1])
return call('LLEN', KEYS[1])
"""
)
"""Put a part of a history where nobody looks, behind as many records as are to be there; what is left there goes."""

ADOPT: Final = Script(
    _CALL
    + _NOW
    + """
local log = call('HMGET', KEYS[1], 'id', 'seq')
local seq = tonumber(log[2])
if log[1] ~= ARGV[1] or not seq then return {'another'} end
for at = 2, 5 do call('ZCARD', KEYS[at]) end
local at, answers, todo = 3, {}, {}
for key = 6, #KEYS, 3 do
  local saga, records, staged = KEYS[key], KEYS[key + 1], KEYS[key + 2]
  local id, epoch, next, ended, many = unpack(ARGV, at, at + 4)
  local row = redis.pcall('HMGET', saga, 'next', 'owner')
  local length = redis.pcall('LLEN', records)
  local answer = 'n'
  if row.err or type(length) ~= 'number' then
    answer = 'd'
  elseif length == 0 and (not row[1] or row[1] == '1') then
    answer = 'y'
    if row[1] then
      local writer = call('HMGET', ARGV[2] .. (row[2] or ''), 'fenced', 'until')
      if writer[1] == '0' and tonumber(writer[2]) >= now() then answer = 'b' end
    end
    if staged ~= records and call('LLEN', staged) ~= tonumber(next) - 1 then answer = 's' end
  end
  many = tonumber(many)
  answers[#answers + 1] = answer
  if answer == 'y' then todo[#todo + 1] = {saga, records, staged, id, epoch, next, ended, at + 5, many} end
  at = at + 5 + many
end
for _, one in ipairs(todo) do
  local saga, records, staged, id, epoch, next, ended, from, many = unpack(one)
  if staged ~= records then
    call('RENAME', staged, records)
    call('PERSIST', records)
  end
  for part = from, from + many - 1, 1000 do
    call('RPUSH', records, unpack(ARGV, part, math.min(part + 999, from + many - 1)))
  end
  seq = seq + 1
  local place = string.format('%.0f', seq)
  call('HSET', KEYS[1], 'seq', place)
  call('HSET', saga, 'seq', place, 'epoch', epoch, 'next', next, 'owner', '')
  call('ZADD', KEYS[2], seq, id)
  call('ZREM', KEYS[5], id)
  if ended == '' then
    call('ZADD', KEYS[3], seq, id)
  else
    call('HSET', saga, 'ended', ended)
    call('ZADD', KEYS[4], ended, id)
  end
end
return {'ok', table.concat(answers)}
"""
)
"""Store whole histories, each if there is nothing of its saga and nobody owns it."""

SWEEP: Final = Script(
    _CALL
    + _NOW
    + """
local empty, writers, prefix, long_ago = KEYS[1], KEYS[2], ARGV[1], now() - ARGV[2]
for at = 3, #ARGV do
  local id = ARGV[at]
  local saga = prefix .. 'saga:' .. id
  local row = call('HMGET', saga, 'next', 'owner')
  if row[1] == '1' and call('LLEN', prefix .. 'records:' .. id) == 0 then
    local writer = call('HMGET', prefix .. 'writer:' .. (row[2] or ''), 'fenced', 'until')
    if writer[1] ~= '0' or tonumber(writer[2]) < now() then
      call('DEL', saga)
      call('ZREM', empty, id)
    end
  elseif row[1] ~= '1' then
    call('ZREM', empty, id)
  end
end
for _, nonce in ipairs(call('ZRANGEBYSCORE', writers, '-inf', string.format('%.0f', long_ago), 'LIMIT', 0, 500)) do
  call('DEL', prefix .. 'writer:' .. nonce)
  call('ZREM', writers, nonce)
end
return 1
"""
)
"""Take away what processes left that died: ids under which nothing was begun, and, after long, the writers."""

INIT: Final = Script(
    _CALL
    + """
if call('HGET', KEYS[1], 'id') then return 0 end
call('HSET', KEYS[1], 'id', ARGV[1], 'major', ARGV[2], 'minor', ARGV[3])
call('HSET', KEYS[1], 'seq', '0')
return 1
"""
)
"""Make a log, if there is none. In two commands: a server that drops transactions drops this one as well."""

RIGHTS: Final = Script(
    """
local lacking = {}
for _, command in ipairs(ARGV) do
  local words = {}
  for word in string.gmatch(command, '%S+') do words[#words + 1] = word == 'KEY' and KEYS[1] or word end
  if not redis.acl_check_cmd(unpack(words)) then lacking[#lacking + 1] = words[1] end
end
return lacking
"""
)
"""Which of these commands the user may not give on keys like this one."""
