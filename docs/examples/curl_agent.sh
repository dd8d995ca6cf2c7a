#!/bin/sh
# An agent in terms of any language: HTTP and JSON, here with curl alone. See docs/curl.md.
set -eu

API=${REHYDRATE_URL:-http://127.0.0.1:8000}/api/v1
HOLDER=$(uname -n)/$$                                # one process: its lease is its own
AGENT='{"name": "courier", "version": "1", "framework": "curl", "reads": ["1"]}'
KEY=parcel/parcel-1/parcels.ship/1 # of the effect: the same whenever this script comes to it

# One call, sent again until it is answered. One Idempotency-Key for all its tries: a lost answer doubles nothing.
post() {
  curl --silent --show-error --fail-with-body --noproxy 127.0.0.1 --max-time 60 --retry 10 --retry-all-errors \
    -H "Authorization: Bearer $REHYDRATE_KEY" -H 'Content-Type: application/json' \
    -H "Idempotency-Key: $(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" "$API$1" -d "$2"
}

# The first field of this name in an answer. A real language has JSON for that.
field() { grep -o "\"$1\": *[^,}]*" | head -n 1 | sed 's/^[^:]*: *//; s/"//g'; }

say() { echo "$(date +%T) $*"; }

# The carrier, who gives a receipt. Here it writes a line into outside.jsonl; really it is one more curl, with the key.
carrier() { echo '{"key": "'"$KEY"'", "action": "parcels.ship", "arguments": '"$1"'}' >>outside.jsonl && echo "shipped-$$"; }

# The first time: say where the run stands and what it means to do, ask, and pause. The lease goes with it.
ask() {
  post "/runs/$run/events" '{"epoch": '"$epoch"', "events": [
    {"type": "checkpoint", "stage": "packed", "ref": "https://warehouse.example/parcel-1", "next": ["Ship it"]},
    {"type": "effect.planned", "key": "'"$KEY"'", "system": "parcels", "action": "ship", "impact": "irreversible",
     "arguments": {"parcel": "parcel-1", "service": "express"}},
    {"type": "paused", "waits": [{"name": "shipping", "kind": "approval", "due_in": 172800, "ask": {
      "summary": "Ship parcel 1 by express, for 38 euros?", "effect": {"key": "'"$KEY"'"}, "risk": "medium",
      "details": [{"label": "To", "value": "Tromsø"}, {"label": "Standard takes", "value": "9 days, for 12 euros"}],
      "schema": {"type": "object", "properties": {"service": {"enum": ["express", "standard"]}}},
      "rationale": "The customer was promised Friday."}}]}]}' >/dev/null
  say "asked, and paused"
}

# A person said yes: plan the same again and start it. The answer says whether it may run, and with which arguments.
ship() {
  started=$(post "/runs/$run/events" '{"epoch": '"$epoch"', "events": [
    {"type": "effect.planned", "key": "'"$KEY"'", "system": "parcels", "action": "ship", "impact": "irreversible",
     "arguments": '"$1"', "start": true}]}')
  if [ "$(echo "$started" | field granted)" = true ]; then
    if ! receipt=$(carrier "$1"); then
      # It may or may not be on its way: never try again by yourself. A person finds out.
      post "/runs/$run/events" '{"epoch": '"$epoch"', "events": [
        {"type": "effect.unknown", "key": "'"$KEY"'", "error": {"code": "no_answer", "message": "No answer."}}]}' >/dev/null
      post "/runs/$run/release" '{"epoch": '"$epoch"'}' >/dev/null
      return
    fi
    post "/runs/$run/events" '{"epoch": '"$epoch"', "events": [
      {"type": "effect.executed", "key": "'"$KEY"'", "receipt": {"id": "'"$receipt"'", "status": "done"}}]}' >/dev/null
    say "shipped $1"
  fi
  post "/runs/$run/events" '{"epoch": '"$epoch"', "events": [{"type": "completed"}]}' >/dev/null
  say "completed"
}

# The same run each time: 201 when it is new, 200 when it is known. Without a holder it is ready for whoever claims it.
post /runs '{"flow": "parcel", "external_id": "parcel-1", "title": "Parcel 1", "agent": '"$AGENT"'}' >/dev/null
say "waiting for work"
while :; do
  # Waits up to 20 seconds for a run that may go on; nothing (204) when none came.
  envelope=$(post /claims '{"flows": ["parcel"], "holder": "'"$HOLDER"'", "agent": '"$AGENT"', "wait": 20}')
  [ -n "$envelope" ] || continue
  run=$(echo "$envelope" | grep -o '"run": *{"id": *"[^"]*"' | grep -o '[^"]*"$' | tr -d '"')
  epoch=$(echo "$envelope" | field epoch)
  if echo "$envelope" | grep -q '"passed": *\["packed"\]'; then
    ship "$(echo "$envelope" | grep -o '"arguments": *{[^}]*}' | head -n 1 | sed 's/^"arguments": *//')"
  else
    ask
  fi
done
