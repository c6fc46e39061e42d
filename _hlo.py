import functools, sys, re
import jax, jax.numpy as jnp
from tests.mosaic import aot
from pallas_kernels.device import H200
from pallas_kernels.fp8 import hopper, hopper_quantize
from pallas_kernels.fp8.spec import *
M,K,N=[int(a) for a in sys.argv[1:4]]
spec=Fp8Spec(M=M,K=K,N=N,scaling="block",dtype="bfloat16")
cfg=hopper.Config(swapped=True,columns=64 if M>32 else 16,blocks=1,split=2) if sys.argv[4]=="split" else None
S=jax.ShapeDtypeStruct
ws=S(scale_shape((N,K),(128,128)),"float32")
def product(c,s,w,ws): return hopper.matmul(spec,c,s,w,ws,config=cfg)
def both(x,w,ws): return hopper.matmul(spec,*hopper_quantize.quantize(x,E4M3),w,ws,config=cfg)
for f,a in ((product,(S((M,K),E4M3),S((M,-(-K//128)),"float32"),S((N,K),E4M3),ws)),(both,(S((M,K),"bfloat16"),S((N,K),E4M3),ws))):
    t=aot.lower(f,a).compile().as_text()
    e=t[t.index("ENTRY"):]
    print(f.__name__); 
    for l in e.splitlines():
        l=re.sub(r"backend_config=.*|metadata=\{[^}]*\}","",l)
        if "parameter(" not in l: print("   ",l.strip()[:170])
