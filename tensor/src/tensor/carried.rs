//! What tensors carry beside their elements.

use super::Tensor;
use std::any::Any;
use std::sync::Arc;

/// Something that was made of a tensor's elements, or nothing.
#[derive(Clone, Default)]
pub(super) struct Carried(Option<Arc<dyn Any + Send + Sync>>);

impl Tensor {
    /// This tensor with something attached that was derived from its elements, to save deriving it again: a weight
    /// carries its packed form. Clones share it; views do not have it, and writing the elements drops it.
    pub fn carrying<T: Any + Send + Sync>(self, made: T) -> Self {
        Self { carried: Carried(Some(Arc::new(made))), ..self }
    }

    /// What it carries, if that is a `T`.
    pub fn carried<T: Any>(&self) -> Option<&T> {
        self.carried.0.as_deref()?.downcast_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_goes_when_elements_are_written() {
        let mut tensor = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap().carrying("packed");
        assert_eq!(tensor.clone().carried(), Some(&"packed"));
        assert_eq!(tensor.carried::<String>(), None, "another type");
        assert_eq!(tensor.reshape([1, 2]).unwrap().carried::<&str>(), None, "a view");
        tensor.as_mut_slice::<f32>("test").unwrap()[0] = 3.0;
        assert_eq!(tensor.carried::<&str>(), None);
    }
}
