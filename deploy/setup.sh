#!/bin/sh
# Prepares the database for nodes that serve more than loopback: the schema, and a token `admin`, which is left in a file
# and made anew when either the token or the file is gone. Safe to run again and again; when the database cannot be asked,
# it ends and leaves token and file as they are.
#
#   AX_DATABASE_URL=postgres://… sh setup.sh FILE
set -eu
umask 077
file=$1

ax migrate
# On its own, not in a condition: an error here is no answer.
tokens=$(ax token ls --json)
if printf '%s' "$tokens" | tr -d '[:space:]' | grep -q '"name":"admin"'; then
  if [ -s "$file" ]; then
    echo "the token admin is in $file"
    exit 0
  fi
  ax token revoke admin >/dev/null
fi
# What an ended attempt may have left is worth nothing.
rm -f "$file" "$file.new"
ax token create admin --role admin >"$file.new"
mv "$file.new" "$file"
echo "the token admin is new, and in $file"
