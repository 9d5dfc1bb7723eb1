from attngen.ir.core import *
from attngen.ir.dims import *
from attngen.ir.expr import *
from attngen.ir.expr_text import *
from attngen.ir.fields import *
from attngen.ir.grid import *
from attngen.ir.kernel import *
from attngen.ir.launch import Host as Host
from attngen.ir.module import *
from attngen.ir.op import *
