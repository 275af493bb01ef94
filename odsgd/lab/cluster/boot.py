"""The shell scripts by which a cluster comes up, and the stand-in `ssh` that leads to its hosts.

A cluster is one process: the init of the head's PID namespace. The hosts' PID namespaces are nested in it:
once that process is killed, the kernel kills every process of the cluster, and with the last one go the network
namespaces, links and mounts. Nothing is pinned to a file, and there is nothing that a crash could leave behind.

The head's init holds a line to the tool, its stdin. Closed without a word it means that the tool has died.
"""
import shlex
from typing import Dict, List, Mapping, Optional, Sequence

from odsgd.lab.cluster import links

NETWORK = "10.0.0.{}"
HEAD, HEAD_ADDRESS = "head", NETWORK.format(254)

COMMON = r"""
failed() { echo "failed $1"; exit 1; }

# Its own /proc and /sys, where libraries look for processes and devices; no memory shared with the other hosts.
private() {
    mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm &&
        mount --bind "$folder/etc-hosts" /etc/hosts && echo "$1" >/proc/sys/kernel/hostname ||
        failed "mount what belongs to $1"
}
"""

HEAD_SCRIPT = COMMON + r"""
folder=$1
read -r pid _ </proc/self/stat  # still the /proc of the tool, with its numbers
echo "init $pid"
exec 3<&0 </dev/null
env --default-signal true || failed "give a host's processes the signals of a login (coreutils 8.31 or newer)"
private head
ip -batch - <<END || failed "make a bridge"
link set lo up
link add eth0 address 02:00:00:00:00:fe type bridge
address add HEAD_ADDRESS/24 dev eth0
link set eth0 up
END
while read -r name address segment shape; do
    { unshare --pid --fork --mount --uts --ipc --net \
            sh "$folder/host.sh" "$folder" "$name" "$address" "$segment" "$shape" 3<&- ||
        failed "make namespaces"; } &
done <"$folder/plan"
{ read -r word <&3 && exec sleep infinity; } >/dev/null 2>&1 &
life=$!
exec >/dev/null 2>&1
wait $life
""".replace("HEAD_ADDRESS", HEAD_ADDRESS)

HOST_SCRIPT = COMMON + r"""
folder=$1 name=$2 address=$3 segment=$4 shape=$5
read -r pid _ </proc/self/stat  # the head's /proc, with its numbers
on_head() { nsenter --net=/proc/1/ns/net "$@"; }
ip -batch - <<END || failed "make the link of $name"
link set lo up
link add eth0 gso_max_size $segment type veth peer name $name netns /proc/1/ns/net
address add $address/24 dev eth0
link set eth0 up
END
on_head ip link set "$name" gso_max_size $segment master eth0 up || failed "join $name to the bridge"
if [ -n "$shape" ]; then
    tc qdisc add dev eth0 root $shape && on_head tc qdisc add dev "$name" root $shape ||
        failed "shape the link of $name with tbf (kernel module sch_tbf)"
fi
private "$name"
[ ! -e "$folder/own-tmp" ] || mount -t tmpfs -o mode=1777 tmpfs /tmp || failed "give $name a /tmp of its own"
# Where the machine has it (its own choice may be BBR, which stands still for 200 ms every ten seconds).
for way in cubic reno; do
    { echo $way >/proc/sys/net/ipv4/tcp_congestion_control; } 2>/dev/null && break
done
echo "host $name $pid"
exec </dev/null >/dev/null 2>&1
sleep infinity &
wait $!
"""

SSH_SCRIPT = r"""#!/bin/sh
# Stands in for ssh on the head of the emulated cluster @name@: the command runs on the host it names.
while :; do
    case ${1-} in
        -n) exec </dev/null; shift ;;
        -[BbcDEeFIiJLlmOopQRSWw]) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=${1-} && host=${host##*@}
[ "$(readlink /proc/self/ns/net)" = '@network@' ] || {
    echo "ssh: this one leads from the head of cluster @name@ to its hosts; use it in: odsgd cluster run" >&2
    exit 255
}
case $host in
@cases@
    *) echo "ssh: Could not resolve hostname $host: there are @known@" >&2; exit 255 ;;
esac
shift
[ -e /proc/$pid ] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
[ $# -gt 0 ] || set -- 'exec "$SHELL"'
# As a login would set it, and on a host where UCX (of MPI) is to use the network. The end of this process is the end
# of the connection: the command is hung up on, and heeds it, even if the caller ignores SIGHUP (`nohup`).
exec nsenter --target $pid --mount --uts --ipc --net --pid setpriv --pdeathsig HUP env --default-signal -i \
    PATH="$PATH" HOME="${HOME:-/root}" USER="${USER:-root}" LOGNAME="${USER:-root}" SHELL="${SHELL:-/bin/sh}" \
    UCX_TLS=tcp,self sh -c 'cd; eval "$1"' sh "$*"
"""


def addresses(hosts: int) -> Dict[str, str]:
    """Names and addresses of the hosts, in their order."""
    return {f"host{index}": NETWORK.format(index + 1) for index in range(hosts)}


def files(rates: Sequence[Optional[int]], own_tmp: bool = False) -> Dict[str, str]:
    """The files of the cluster's folder by name: for the scripts, and the hosts file for the user."""
    known = addresses(len(rates))
    everyone = {"localhost": "127.0.0.1", HEAD: HEAD_ADDRESS, **known}
    shapes = [links.discipline(rate) if rate else "" for rate in rates]
    return {**({"own-tmp": ""} if own_tmp else {}),
            "head.sh": HEAD_SCRIPT, "host.sh": HOST_SCRIPT, "hosts": "".join(f"{name}\n" for name in known),
            "etc-hosts": "".join(f"{address} {name}\n" for name, address in everyone.items()),
            "plan": "".join(f"{name} {known[name]} {links.segment(rate)} {shape}\n"
                            for name, rate, shape in zip(known, rates, shapes))}


def ssh_script(name: str, network: str, pids: Dict[str, int]) -> str:
    """The stand-in, which knows the init of every host as the head's /proc numbers it."""
    known = addresses(len(pids))
    cases: List[str] = [f"    {host} | {known[host]}) pid={pids[host]} ;;" for host in known]
    text = SSH_SCRIPT.replace("@cases@", "\n".join(cases)).replace("@known@", f"host0 to host{len(pids) - 1}")
    return text.replace("@name@", name).replace("@network@", network)


def entering(pid: int, directory: str, command: Sequence[str]) -> List[str]:
    """`command` in the head's namespaces; the one of processes is the caller's part, since it takes a fork."""
    return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net",
            "sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", directory, *command]


def on_host(directory: str, env: Mapping[str, str], command: Sequence[str]) -> str:
    """The line for the shell of a host."""
    words = ["env", *(f"{name}={value}" for name, value in env.items()), *command]
    return f"cd {shlex.quote(directory)} && exec {shlex.join(words)}"
