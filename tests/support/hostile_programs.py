"""Hostile programs, each bounded in itself. One that gets what it wants prints ESCAPED.

VICTIM: pid of a process of the same user. PORT, UDP: of listeners outside. CANARY: a folder
outside. SECRET: in the environment of the victim and of the process that runs the sandbox.
"""

CALL = (
    "import ctypes,os\nL=ctypes.CDLL(None,use_errno=True)\n"
    "def call(n,*a): return L.syscall(ctypes.c_long(n),*[ctypes.c_long(x) if isinstance(x,int)"
    " else x for x in a])\n"
)
PROGRAMS = {
    "fork_bomb": (
        "import os,time\nn=0\nfor i in range(150):\n try: p=os.fork()\n except OSError: break\n"
        " if p==0: time.sleep(2); os._exit(0)\n n+=1\n"
        "print('ESCAPED' if n>64 else 'ok',n,flush=True)"
    ),
    "thread_bomb": (
        "import threading,time\nn=0\ntry:\n for i in range(300):"
        " threading.Thread(target=time.sleep,args=(1,),daemon=True).start(); n+=1\n"
        "except (RuntimeError,MemoryError): pass\nprint('ESCAPED' if n>64 else 'ok',n,flush=True)\n"
        "import os; os._exit(0)"
    ),
    "memory": "b=bytearray(900<<20)\nfor i in range(0,len(b),4096): b[i]=1\nprint('ESCAPED')",
    "memory_in_children": (
        "import os,time\nfor i in range(4):\n if os.fork()==0:\n  b=bytearray(250<<20)\n"
        "  for i in range(0,len(b),4096): b[i]=1\n  time.sleep(1); os._exit(0)\n"
        "if not any([os.wait()[1] for i in range(4)]): print('ESCAPED')"
    ),
    "memory_in_memfd": (
        "import os\nk=[]\nfor i in range(14):\n f=os.memfd_create('x'); k.append(f)\n"
        " for j in range(50): os.write(f,bytes(1<<20))\nprint('ESCAPED')"
    ),
    "memory_in_sysv_shm": CALL
    + (
        "i=L.shmget(0,700<<20,0o1600)\nL.shmat.restype=ctypes.c_void_p\np=L.shmat(i,None,0)\n"
        "print('ESCAPED' if i>=0 else 'ok')\nL.shmctl(i,0,None)"
    ),
    "dev_shm_fill": (
        "f=open('/dev/shm/sandbox_fill','wb')\ntry:\n for i in range(100): f.write(bytes(1<<20))\n"
        " f.flush(); print('ESCAPED')\nfinally:\n import os; os.unlink('/dev/shm/sandbox_fill')"
    ),
    "decompress_bomb": (
        "import zlib\nd=zlib.compressobj(9); z=b''.join(d.compress(bytes(1<<20)) for i in"
        " range(900))+d.flush()\nx=zlib.decompress(z); print('ESCAPED',len(x))"
    ),
    "infinite_loop": "while True: pass",
    "sleep_forever": "import time\ntime.sleep(1000)",
    "ignore_signals": (
        "import signal\nfor s in range(1,65):\n try: signal.signal(s,signal.SIG_IGN)\n"
        " except Exception: pass\nwhile True: pass"
    ),
    "busy_children": (
        "import os\nfor i in range(4):\n if os.fork()==0:\n  while True: pass\n"
        "import time; time.sleep(1000)"
    ),
    "stop_self": "import os,signal\nos.kill(os.getpid(),signal.SIGSTOP)",
    "stdout_closed": "import os,time\nfor i in range(3): os.close(i)\ntime.sleep(1000)",
    "daemon": (
        "import os,time,sys\nif os.fork()==0:\n os.setsid()\n if os.fork()==0:\n"
        "  for i in range(3):\n   try: os.close(i)\n   except OSError: pass\n  end=time.time()+20\n"
        "  while time.time()<end:\n   time.sleep(.05)\n"
        "   try: open('CANARY/open/heartbeat','w').write(str(time.time()))\n"
        "   except OSError: pass\n os._exit(0)\ntime.sleep(.3)"
    ),
    "rabbit": (
        "import os,time\nend=time.time()+6\nif os.fork()==0:\n os.setsid()\n"
        " while time.time()<end:\n  try:\n   if os.fork(): os._exit(0)\n  except OSError: pass\n"
        "  try: open('CANARY/open/heartbeat','w').write(str(time.time()))\n  except OSError:"
        " pass\nos._exit(0)"
    ),
    "kill_victim": "import os\nos.kill(VICTIM,10)\nprint('ESCAPED')",
    "pidfd_kill_victim": (
        "import os,signal\nf=os.pidfd_open(VICTIM); signal.pidfd_send_signal(f,10)\n"
        "print('ESCAPED')"
    ),
    "stop_parent": (
        "import os,signal\nos.kill(os.getppid(),signal.SIGSTOP)\nimport time; time.sleep(1000)"
    ),
    "signal_storm": (
        "import os,signal,time\nend=time.time()+.3\nwhile time.time()<end:\n"
        " for p in (os.getppid(),1,VICTIM):\n  try: os.kill(p,signal.SIGUSR2)\n"
        "  except OSError: pass\nprint('done')"
    ),
    "ptrace_victim": CALL + "r=call(101,16,VICTIM,0,0)\nprint('ESCAPED' if r==0 else 'ok')",
    "read_victim_memory": CALL
    + (
        "m=[l for l in open('/proc/VICTIM/maps') if '[heap]' in l or '[stack]' in"
        " l][0].split()[0].split('-')\nf=open('/proc/VICTIM/mem','rb'); f.seek(int(m[0],16));"
        " print('ESCAPED',len(f.read(64)))"
    ),
    "process_vm_readv": CALL
    + (
        "a=int([l for l in open('/proc/self/maps') if 'python' in l][0].split('-')[0],16)\n"
        "b=ctypes.create_string_buffer(8)\nclass I(ctypes.Structure):"
        " _fields_=[('p',ctypes.c_void_p),('n',ctypes.c_size_t)]\n"
        "for l in (open('/proc/VICTIM/maps') if os.path.exists('/proc/VICTIM/maps') else"
        " ['0-0']):\n"
        " r=call(310,VICTIM,ctypes.byref(I(ctypes.addressof(b),8)),1,ctypes.byref(I(int(l.split('-"
        "')[0],16),8)),1,0)\n if r>0: print('ESCAPED'); break"
    ),
    "environ_of_others": (
        "import os\nfor p in os.listdir('/proc'):\n if p.isdigit():\n  try:\n"
        "   if b'SECRET' in open('/proc/'+p+'/environ','rb').read() and p!='self':"
        " print('ESCAPED',p)\n  except OSError: pass"
    ),
    "own_environ": (
        "import os\nprint('ESCAPED' if 'SECRET' in str(os.environ) or b'SECRET' in"
        " open('/proc/self/environ','rb').read() else 'ok')"
    ),
    "command_lines": (
        "import os\nn=[p for p in os.listdir('/proc') if p.isdigit()]\n"
        "print('ESCAPED' if len(n)>8 else 'ok',len(n))"
    ),
    "tcp": (
        "import socket\nsocket.create_connection(('127.0.0.1',PORT),1).send(b'x')\nprint('ESCAPED')"
    ),
    "udp": (
        "import socket\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);"
        " s.sendto(b'hostile',('127.0.0.1',UDP))"
    ),
    "abstract_unix": (
        "import socket\ns=socket.socket(socket.AF_UNIX); s.connect('\\0sandbox_canary');"
        " print('ESCAPED')"
    ),
    "path_unix": (
        "import socket\ns=socket.socket(socket.AF_UNIX); s.connect('CANARY/open/sock');"
        " print('ESCAPED')"
    ),
    "read_file": "print('ESCAPED' if 'canary' in open('CANARY/secret.txt').read() else 'ok')",
    "read_passwd": "print('ESCAPED' if 'root' in open('/etc/passwd').read() else 'ok')",
    "write_file": "open('CANARY/open/file','w').write('hostile'); print('ESCAPED')",
    "symlink": (
        "import os\nos.symlink('CANARY/open/file','link'); open('link','w').write('hostile');"
        " print('ESCAPED')"
    ),
    "delete_files": "import shutil,os\nshutil.rmtree('CANARY/open/tree'); print('ESCAPED')",
    "chmod_outside": "import os\nos.chmod('CANARY/open/file',0o777); print('ESCAPED')",
    "huge_file": (
        "f=open('big','wb')\nfor i in range(200): f.write(bytes(1<<20))\n"
        "f.flush(); print('ESCAPED')"
    ),
    "many_files": "for i in range(8000): open('f%d'%i,'w').close()\nprint('ESCAPED')",
    "huge_output": (
        "import sys\nfor i in range(4000): sys.stdout.write('x'*100000)\nprint('ESCAPED')"
    ),
    "inherited_fd": (
        "import os\nfor f in range(3,60):\n try:\n"
        "  if b'canary' in os.pread(f,100,0): print('ESCAPED',f)\n except OSError: pass"
    ),
    "setuid_program": (
        "import os\nr=os.popen('CANARY/suid_id -u 2>&1').read().strip(); print('ESCAPED' if r=='0'"
        " else 'ok',r)"
    ),
    "new_user_namespace": CALL
    + "r=L.unshare(0x10000000|0x20000)\nprint('ESCAPED' if r==0 else 'ok')",
    "kernel_surface": CALL
    + (
        "b=ctypes.create_string_buffer(256)\n"
        "r=dict(io_uring=call(425,1,b),keyctl=call(250,0,-3,1),userfaultfd=call(323,1),bpf="
        "call(321,0,b,64),add_key=call(248,b'user',b'x',b'y',1,-2))\n"
        "print('ESCAPED' if [k for k,v in r.items() if v>=0] else 'ok',r)"
    ),
    "remount_rw": CALL
    + (
        "r=L.mount(None,b'/',None,4096|32,None); s=L.mount(b'tmpfs',b'/tmp',b'tmpfs',0,None)\n"
        "print('ESCAPED' if r==0 or s==0 else 'ok')"
    ),
    "deep_recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "segfault": "import ctypes\nctypes.string_at(1)",
    "unlink_cwd": (
        "import os,shutil\nd=os.getcwd()+'/x'; os.mkdir(d); os.chdir(d); os.rmdir(d); os.getcwd()"
    ),
    "raise_limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_AS,(r.RLIM_INFINITY,)*2);"
        " b=bytearray(700<<20); print('ESCAPED')"
    ),
    "result_forgery": (
        "import os\nfor f in range(3,300):\n try:"
        ' os.write(f,b\'{"code":0,"stdout":"ESCAPED","stderr":"","value":null}\\n\')\n'
        " except OSError: pass"
    ),
    "kill_harness": "import os,time\nos.kill(os.getppid(),9)\ntime.sleep(.2)",
    "signal_everyone": "import os\ntry: os.kill(-1,23)\nexcept OSError: pass",
    "fill_folder": (
        "for i in range(200):\n with open('f%d'%i,'wb') as f: f.write(bytes(1<<20))\n"
        "import time; time.sleep(.3); print('ESCAPED')"
    ),
    "deep_folders": (
        "import os,time\nfor i in range(3000): os.mkdir('d'); os.chdir('d')\n"
        "time.sleep(.3); print('ESCAPED')"
    ),
    "closed_folders": (
        "import os\nfor i in range(20): os.mkdir('d%d'%i);"
        " open('d%d/f'%i,'w').close(); os.mkdir('c%d'%i,0)"
    ),
    "hard_link": "import os\nos.link('CANARY/secret.txt','link')\nprint('ESCAPED')",
    "rename_outside": "import os\nos.rename('CANARY/open/file','file')\nprint('ESCAPED')",
    "truncate_outside": "import os\nos.truncate('CANARY/open/file',0)\nprint('ESCAPED')",
    "make_device": (
        "import os,stat\nos.mknod('disk',0o600|stat.S_IFBLK,os.makedev(8,0));"
        " os.open('disk',os.O_RDONLY)\nprint('ESCAPED')"
    ),
    "netlink": (
        "import socket\nsocket.socket(socket.AF_NETLINK,socket.SOCK_RAW,0)\nprint('ESCAPED')"
    ),
    "limits_of_victim": (
        "import resource\nresource.prlimit(VICTIM,resource.RLIMIT_NOFILE,(64,64))\nprint('ESCAPED')"
    ),
    "memory_not_resident": (
        "import mmap\nm=mmap.mmap(-1,8<<20); m[:]=bytes(8<<20);"
        " m.madvise(mmap.MADV_DONTNEED)\nprint('ESCAPED')"
    ),
    "vfork_sleep": "import ctypes\nL=ctypes.CDLL(None)\nif L.vfork()==0: L.sleep(1000)",
    "sync_storm": (
        "import os,time\nf=open('f','wb'); end=time.time()+.4; n=0\n"
        "while time.time()<end: f.write(bytes(4096)); f.flush(); os.fsync(f.fileno()); os.sync();"
        " n+=1\nprint('ok',n)"
    ),
    "write_through": (
        "import os\nf=os.open('f',os.O_CREAT|os.O_WRONLY|os.O_SYNC)\n"
        "for i in range(200): os.write(f,bytes(4096))\nprint('ok')"
    ),
    "memfd_exec": (
        "import os\nf=os.memfd_create('x')\nos.write(f,open('/bin/true','rb').read())\n"
        "print('ESCAPED',flush=True); os.execve(f,['x'],{})"
    ),
    "inotify_flood": CALL
    + "n=0\nwhile n<400 and L.inotify_init1(0)>=0: n+=1\nprint('ESCAPED' if n else 'ok',n)",
    "pending_signals": (
        "import signal,os,ctypes\nL=ctypes.CDLL(None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK,{40})\nn=0\n"
        "while n<9999 and L.sigqueue(os.getpid(),40,ctypes.c_void_p(0))==0: n+=1\n"
        "print('ESCAPED' if n>99 else 'ok',n)"
    ),
    "message_queue": CALL
    + (
        "r=L.mq_open(b'/sandbox_canary',os.O_RDWR); s=L.mq_unlink(b'/sandbox_canary');"
        " t=L.mq_open(b'/left',os.O_CREAT|os.O_RDWR,0o600,None)\n"
        "print('ESCAPED' if r>=0 or s==0 or t>=0 else 'ok')"
    ),
    "shared_memory_by_id": CALL
    + (
        "L.shmat.restype=ctypes.c_void_p\np=L.shmat(SEGMENT,None,0); s=L.shmctl(SEGMENT,0,None)\n"
        "print('ESCAPED' if p not in (None,2**64-1) or s==0 else 'ok')"
    ),
    "datagram_by_path": (
        "import socket\na,b=socket.socketpair(socket.AF_UNIX,socket.SOCK_DGRAM)\n"
        "a.sendmsg([b'hostile'],[],0,'CANARY/open/datagrams')\nprint('ESCAPED')"
    ),
    "flags_of_a_file": (
        "import fcntl,os\nf=os.open(os.__file__,os.O_RDONLY)\nb=bytearray(8)\n"
        "fcntl.ioctl(f,0x80086601,b); fcntl.ioctl(f,0x40086602,bytes(b))\nprint('ESCAPED')"
    ),
    "lease": (
        "import fcntl,os\nf=os.open(os.__file__,os.O_RDONLY)\n"
        "fcntl.fcntl(f,fcntl.F_SETLEASE,fcntl.F_RDLCK)\nprint('ESCAPED')"
    ),
    "notified_of_files": (
        "import fcntl,os\nf=os.open(os.path.dirname(os.__file__),os.O_RDONLY)\n"
        "fcntl.fcntl(f,fcntl.F_NOTIFY,0x80000001)\nprint('ESCAPED')"
    ),
    "lock_outside": (
        "import fcntl,os\nf=open(os.__file__)\nfcntl.flock(f,fcntl.LOCK_EX)\nprint('ESCAPED')"
    ),
    "blocks_at_once": (
        "import os\nfor i in range(60):\n f=os.open('f%d'%i,os.O_CREAT|os.O_WRONLY);"
        " os.posix_fallocate(f,0,60<<20)\nprint('ESCAPED')"
    ),
    "sparse_file": "f=open('s','wb')\nf.truncate(1<<40)\nprint('ESCAPED')",
    "segments_of_the_processor": CALL
    + "b=ctypes.create_string_buffer(64)\nprint('ESCAPED' if call(154,0,b,64)>=0 else 'ok')",
    "sibling": CALL
    + (
        "import time\nif call(56,0x8000|17,0,0,0,0)==0:\n end=time.time()+20\n"
        " while time.time()<end:\n  time.sleep(.05)\n"
        "  try: open('CANARY/open/heartbeat','w').write(str(time.time()))\n  except OSError: pass"
    ),
    "memory_of_the_harness": (
        "import os\nfor name in ('mem','maps','environ','fd/3','fd/4'):\n"
        " try: os.open('/proc/%d/%s'%(os.getppid(),name),os.O_RDONLY); print('ESCAPED',name)\n"
        " except OSError: pass"
    ),
    "memory_in_sockets": (
        "import os,socket,time\nfor i in range(28):\n if os.fork()==0:\n  k=[]\n  try:\n"
        "   while True:\n    p=socket.socketpair(); k.append(p)\n    for s in p:\n"
        "     s.setblocking(False)\n     try:\n"
        "      while True: os.write(s.fileno(),bytes(65536))\n     except BlockingIOError: pass\n"
        "  except OSError: pass\n  print('ESCAPED' if len(k)>40 else 'ok',flush=True);"
        " time.sleep(.5); os._exit(0)\ntime.sleep(.8)"
    ),
    "unicode_bomb": (
        "import sys\nsys.stdout.reconfigure(errors='surrogatepass')\n"
        "print('\\ud800'*100000+'\\u202e'*100000+'\\x00'*1000+'\\U0001d7d8'*10000)"
    ),
    "shared_zero_pages": (
        "import mmap,os\nf=os.open('/dev/zero',os.O_RDONLY)\n"
        "m=mmap.mmap(f,8<<20,flags=mmap.MAP_SHARED,prot=mmap.PROT_READ)\n"
        "for i in range(0,8<<20,4096): m[i]\nm.madvise(mmap.MADV_DONTNEED)\nprint('ESCAPED')"
    ),
    "perf_event": CALL
    + (
        "b=ctypes.create_string_buffer(128)\nb[4]=128\n"
        "print('ESCAPED' if any(call(298,b,p,-1,-1,0)>=0 for p in"
        " (0,os.getppid(),VICTIM)) else 'ok')"
    ),
    "storm_to_groups": (
        "import os,signal,time\nend=time.time()+.3\nwhile time.time()<end:\n"
        " for g in {os.getpgid(os.getppid()),os.getsid(0),os.getpgid(VICTIM) if"
        " os.path.exists('/proc/VICTIM') else 1}:\n  try: os.killpg(g,signal.SIGUSR2)\n"
        "  except OSError: pass\nfor g in (os.getpgid(os.getppid()),os.getsid(0)):\n"
        " try: os.killpg(g,signal.SIGKILL)\n except OSError: pass"
    ),
    "stop_groups": (
        "import os,signal,time\nos.killpg(os.getpgid(os.getppid()),signal.SIGSTOP)\n"
        "time.sleep(1000)"
    ),
    "ptrace_sibling": CALL
    + (
        "import time\nk=os.fork()\nif k==0: time.sleep(.5); os._exit(0)\n"
        "r=[call(101,o,p,0,0) for o in (16,0x4206) for p in (k,os.getppid())]\n"
        "print('ESCAPED' if 0 in r else 'ok',r)"
    ),
    "calls_of_32_bits": (
        "import ctypes,mmap\n"
        "m=mmap.mmap(-1,4096,flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS,prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"
        "print('ESCAPED' if"
        " ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()>0 else"
        " 'ok',flush=True)"
    ),
    "own_memory_into_a_file": (
        "import ctypes,mmap,os\nctypes.CDLL(None).prctl(4,1,0,0,0)\np=os.__file__\n"
        "m=mmap.mmap(os.open(p,os.O_RDONLY),4096,prot=mmap.PROT_READ)\n"
        "w=os.open('/proc/self/mem',os.O_RDWR)\nfor l in open('/proc/self/maps'):\n"
        " if l.rstrip().endswith('/os.py'): os.pwrite(w,b'hostile',int(l.split('-')[0],16))\n"
        "print('ESCAPED' if open(p).read(7)=='hostile' else 'ok')"
    ),
    "namespace_by_clone": CALL
    + (
        "r=[call(56,f|17,0,0,0,0) for f in (0x10000000,0x20000,0x40000000)]\n"
        "if 0 in r: print('ESCAPED',flush=True); os._exit(0)\n"
        "print('ESCAPED' if max(r)>0 else 'ok')"
    ),
    "output_with_holes": (
        "import os\nos.lseek(1,60<<20,0)\nos.write(1,b'ESCAPED')\n"
        "os.lseek(2,60<<20,0)\nos.write(2,b'x')"
    ),
    "fifo_and_fork": (
        "import os\nos.mkfifo('p')\nfor i in range(20):\n if os.fork()==0: break\nopen('p').read()"
    ),
    "fork_when_killed": (
        "import os,signal,time\nfor i in range(6): os.fork()\n"
        "os.setsid() if os.getpgrp()!=os.getpid() else None\nend=time.time()+20\n"
        "while time.time()<end:\n try:\n  if os.fork(): os.kill(os.getpid(),signal.SIGKILL)\n"
        "  os.setsid()\n  open('CANARY/open/heartbeat','w').write('x')\n except OSError: pass"
    ),
    "keyrings": CALL
    + (
        "r=[call(250,1,b'ring',0,0,0),call(250,0,-5,1),call(248,b'keyring',b'x',None,0,-4),"
        "call(249,b'user',b'x',None,-3)]\nprint('ESCAPED' if max(r)>=0 else 'ok',r)"
    ),
    "affinity_of_victim": "import os\nos.sched_setaffinity(VICTIM,{0})\nprint('ESCAPED')",
}
