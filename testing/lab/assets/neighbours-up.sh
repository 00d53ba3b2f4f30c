# In a guest of neighbours-faults, read by its script and by the shell that the scenario keeps in it. The scenario puts /lab/lists beside it:
#   ME number   EXPORTS name:path:client   DEVICES name:peer   SENDS name:address
# An emulated CPU takes milliseconds to start a program: what is asked often uses what the shell has itself.
. /lab/lists
C=/sys/kernel/config/mmblk
number() { case $1 in a) n=1;; b) n=2;; c) n=3;; *) n=;; esac; }
modules() {
  for m in $(cat /lab/order) cw_neigh mmnet mmblk neigh_fault; do grep -q "^$m " /proc/modules || insmod /lab/$m.ko || return 1; done
  [ -e $C ] || mount -t configfs none /sys/kernel/config || return 1
  for x in $EXPORTS; do
    e=$C/exports/${x%%:*}; x=${x#*:}
    mkdir $e && echo ${x%%:*} > $e/path && echo ${x#*:} > $e/clients && echo 1 > $e/enable || return 1
  done
}
down() {
  for e in $C/exports/*; do [ -e $e ] || continue; echo 0 > $e/enable && rmdir $e || return 1; done
  rmmod mmblk && rmmod mmnet && rmmod neigh_fault || return 1
  # Frames that a socket holds keep the core for a moment.
  i=0; until rmmod cw_neigh; do i=$((i+1)); [ $i -gt 100 ] && return 1; sleep 0.1; done
}
# Devices come with the first connection, and anew with the modules.
addresses() {
  had=
  while :; do
    for d in /sys/class/net/mm*; do
      [ -e $d/ifalias ] && read -r index < $d/ifindex && read -r peer < $d/ifalias || continue
      case "$had " in *" $index "*) continue ;; esac
      number "$peer"; [ -n "$n" ] || continue
      if [ $n -lt $ME ]; then net=$ME$n; else net=$n$ME; fi
      ip addr add 10.81.$net.$ME/24 dev ${d##*/} && ip link set ${d##*/} up && had="$had $index"
    done
    sleep 0.2
  done 2>/dev/null
}
traffic() {
  addresses &
  /lab/agent traffic-receive 7100 &
  for x in $SENDS; do /lab/agent traffic-send ${x#*:}:7100 /run/t-${x%%:*} & done
  for x in $DEVICES; do
    name=${x%%:*}; d=$C/devices/${name#d-}
    mkdir $d && echo ${x#*:} > $d/peer && echo ${name#d-} > $d/export && echo 600000 > $d/wait_ms && echo 1 > $d/enable || return 1
    ( until read -r disk < $d/disk && [ -n "$disk" ]; do sleep 0.1; done; exec /lab/agent traffic-disk /dev/$disk /run/t-$name ) &
  done
}
# What the traffic has done, and how often connections ended. A file may not be there yet, or not any more.
seen() {
  for f in /run/t-?-??; do [ -e $f ] && { done=; read -r done < $f; echo "done ${f#/run/t-} $done"; }; done 2>/dev/null
  for d in /sys/class/net/mm*; do read -r peer < $d/ifalias && read -r downs < $d/carrier_down_count && echo "carrier $peer $downs"; done 2>/dev/null
  for d in $C/devices/*; do
    [ -e $d/counters ] && while read -r name value; do [ $name = lost ] && echo "lost ${d##*/} $value"; done < $d/counters
  done 2>/dev/null
  true
}
# Waits until the connection to a peer has ended once more than so often: ended PEER COUNT SECONDS
ended() {
  i=0
  while [ $i -lt $(($3 * 20)) ]; do
    for d in /sys/class/net/mm*; do
      read -r peer < $d/ifalias && [ "$peer" = $1 ] && read -r downs < $d/carrier_down_count && [ $downs -gt $2 ] && return 0
    done 2>/dev/null
    i=$((i+1)); sleep 0.05
  done
  return 1
}
# Free memory in KiB once caches are given up, and mappings of devices' memory.
holds() {
  echo 3 > /proc/sys/vm/drop_caches
  while read -r name value unit; do [ $name = MemFree: ] && free=$value; done < /proc/meminfo
  maps=$(grep -c phys= /proc/vmallocinfo)
  echo "$free $maps"
}
