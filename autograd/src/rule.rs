//! Backward rules.

use crate::{InputGrads, MultiplyAdds, Result};
use tensor::{Shape, Tensor};

/// Computes the value of an operation once more: see [`Rule::recompute`].
pub type Recompute<'a> = Box<dyn FnOnce() -> Result<Tensor> + 'a>;

/// The backward rule of one recorded operation: a plain struct of what the operation saved.
pub trait Rule: Send + 'static {
    /// The operation's name.
    fn name(&self) -> &'static str;

    /// What it saved, by name.
    fn saved(&self) -> Vec<(&'static str, &Tensor)>;

    /// Mutable access to [`saved`](Self::saved), in the same order, without the trailing tensors that only
    /// [`recompute`](Self::recompute) reads. A recomputing tape takes values out and puts them back, and
    /// [`Tape::tamper`](crate::Tape::tamper) spoils them. A batch in pieces gives none: what it saved
    /// belongs to the tapes of its pieces.
    fn saved_mut(&mut self) -> Vec<&mut Tensor>;

    /// How to recompute the operation's value, bit for bit, from what the rule holds; `None` if that is impossible, or
    /// slow. See [`Tape::recomputing_cheap`](crate::Tape::recomputing_cheap).
    fn recompute(&self) -> Option<Recompute<'_>> {
        None
    }

    /// Turns the gradient of the operation's value into those of its inputs. `upstream` has the value's
    /// shape and is contiguous; the rule may reuse its buffer when it is unique.
    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()>;

    /// Whether it stands for other operations, each of which a profile lists by itself.
    fn is_frame(&self) -> bool {
        false
    }

    /// The multiply-adds of an operation whose time goes into them, for a value of this shape. For profiles.
    fn multiply_adds(&self, _value: &Shape) -> MultiplyAdds {
        MultiplyAdds::default()
    }
}

/// Writes the three bookkeeping methods of a [`Rule`]: its name, and its saved tensors by field.
///
/// `rule_fields!("linear", x, weight);` inside an `impl Rule for`. After a semicolon come those that only
/// [`Rule::recompute`] reads. The name may be a field: `rule_fields!(self.op, x);`.
#[macro_export]
macro_rules! rule_fields {
    (self.$name:ident $($rest:tt)*) => {
        fn name(&self) -> &'static str {
            self.$name
        }
        $crate::rule_fields!(@saved $($rest)*);
    };
    (@saved $(, $field:ident)* $(; $($for_value:ident),+)? $(,)?) => {
        fn saved(&self) -> Vec<(&'static str, &$crate::tensor::Tensor)> {
            vec![$((stringify!($field), &self.$field),)* $($((stringify!($for_value), &self.$for_value)),+)?]
        }
        fn saved_mut(&mut self) -> Vec<&mut $crate::tensor::Tensor> {
            vec![$(&mut self.$field),*]
        }
    };
    ($name:expr $(, $($rest:tt)*)?) => {
        fn name(&self) -> &'static str {
            $name
        }
        $crate::rule_fields!(@saved $(, $($rest)*)?);
    };
}
