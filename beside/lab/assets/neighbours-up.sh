#!/bin/sh
# In a guest of neighbours-faults: modules, exports, devices, addresses, traffic. Its lists come from the scenario:
#   ME number   EXPORTS name:path:client   DEVICES name:peer   SENDS name:address
# With the argument `modules` it does the first two only (the traffic runs already); with `down` it takes the modules away.
. /lab/lists
C=/sys/kernel/config/mmblk
number() { case $1 in a) echo 1;; b) echo 2;; c) echo 3;; esac; }
modules() {
  for m in $(cat /lab/order) cw_neigh mmnet mmblk neigh_fault; do grep -q "^$m " /proc/modules || insmod /lab/$m.ko || exit 1; done
  [ -e $C ] || mount -t configfs none /sys/kernel/config || exit 1
  for x in $EXPORTS; do
    e=$C/exports/${x%%:*}; x=${x#*:}
    mkdir $e && echo ${x%%:*} > $e/path && echo ${x#*:} > $e/clients && echo 1 > $e/enable || exit 1
  done
}
down() {
  for e in $C/exports/*; do [ -e $e ] || continue; echo 0 > $e/enable && rmdir $e || exit 1; done
  rmmod mmblk mmnet neigh_fault || exit 1
  # Frames that a socket holds keep the core for a moment.
  i=0; until rmmod cw_neigh; do i=$((i+1)); [ $i -gt 40 ] && exit 1; sleep 0.25; done
}
# Devices come with the first connection, and anew with the modules.
addresses() {
  while :; do
    for d in /sys/class/net/mm*; do
      [ -e $d/ifalias ] || continue
      n=$(number "$(cat $d/ifalias)"); [ -n "$n" ] || continue
      if [ $n -lt $ME ]; then net=$ME$n; else net=$n$ME; fi
      ip addr show dev ${d##*/} 2>/dev/null | grep -q 10.81.$net.$ME/ && continue
      ip addr add 10.81.$net.$ME/24 dev ${d##*/} 2>/dev/null && ip link set ${d##*/} up 2>/dev/null
    done
    sleep 0.5
  done
}
traffic() {
  addresses &
  /lab/agent traffic-receive 7100 &
  for x in $SENDS; do /lab/agent traffic-send ${x#*:}:7100 /run/t-${x%%:*} & done
  for x in $DEVICES; do
    name=${x%%:*}; d=$C/devices/${name#d-}
    mkdir $d && echo ${x#*:} > $d/peer && echo ${name#d-} > $d/export && echo 600000 > $d/wait_ms && echo 1 > $d/enable || exit 1
    ( until [ -n "$(cat $d/disk)" ]; do sleep 0.2; done; exec /lab/agent traffic-disk /dev/$(cat $d/disk) /run/t-$name ) &
  done
}
case $1 in
  modules) modules ;;
  down) down ;;
  *) modules; traffic ;;
esac
