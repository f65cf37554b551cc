//! Parameters of several models: whose gradients are whose.

mod support;

use autograd::{Error, Gradients, Parameters, ParametersBuilder, Tape};
use support::{of, parameters, times, vector};
use tensor::{DType, Tensor};

#[test]
fn gradients_of_another_model_are_refused() {
    let (own, p, _) = parameters();
    let backward = |in_pieces: bool, gradients: &mut Gradients| {
        let tape = Tape::new();
        let y = match in_pieces {
            true => {
                let x = tape.constant(Tensor::full([2, 2], 1.0));
                let times_p = tape.in_pieces(&x, 1, |x, _| Ok((times(x, &x.tape().parameter(&own, p))?, ())));
                times_p.map(|(y, _): (_, Vec<()>)| y)
            }
            false => times(&tape.constant(vector(&[1.0, 1.0])), &tape.parameter(&own, p)),
        }?;
        tape.backward_from(&y, Tensor::full(y.shape().clone(), 1.0), gradients)
    };
    let model = |names: [&str; 2], extents: [usize; 2], dtype: DType| {
        let mut builder = ParametersBuilder::default();
        names.into_iter().zip(extents).for_each(|(name, extent)| _ = builder.add(name, [extent], vec![0.0; extent]));
        Gradients::new(&builder.build(dtype).unwrap()).unwrap()
    };
    for in_pieces in [false, true] {
        let others = [
            Gradients::default(),
            model(["p", "q"], [7, 3], DType::F64),
            model(["p", "q"], [2, 3], DType::F32),
            model(["other", "q"], [2, 3], DType::F64),
        ];
        for mut other in others {
            let error = backward(in_pieces, &mut other).unwrap_err();
            assert!(matches!(error, Error::ForeignGradients { .. }), "{error}");
        }
        backward(in_pieces, &mut model(["p", "q"], [2, 3], DType::F64)).unwrap();
    }
}

/// Laid out alike, they would be added up.
#[test]
fn gradients_of_two_models_in_one_step_are_refused() {
    let (one, p, _) = parameters();
    let other = one.duplicate().unwrap();
    let mut gradients = Gradients::new(&one).unwrap();
    let backward = |parameters: &Parameters, gradients: &mut Gradients| {
        let tape = Tape::new();
        let y = times(&tape.constant(vector(&[1.0, 1.0])), &tape.parameter(parameters, p))?;
        tape.backward_from(&y, vector(&[1.0, 1.0]), gradients)
    };
    backward(&one, &mut gradients).unwrap();
    backward(&one.share(), &mut gradients).unwrap();
    assert_eq!(of(&gradients, p), [2.0, 2.0]);
    assert_eq!((gradients.ensure_of(&one), gradients.ensure_of(&other)), (Ok(()), Err(Error::TwoModels)));
    assert_eq!(backward(&other, &mut gradients), Err(Error::TwoModels));
    // A new step may be the other's.
    backward(&other, &mut gradients).unwrap();
    assert_eq!((gradients.ensure_of(&one), gradients.ensure_of(&other)), (Err(Error::TwoModels), Ok(())));
}

/// Its values are detached, so that its parameters need no gradients, whatever their layout.
#[test]
fn a_teacher_may_stand_beside_its_student_in_pieces() {
    let (student, p, _) = parameters();
    let mut builder = ParametersBuilder::default();
    let [first, _, last] = ["x", "y", "z"].map(|name| builder.add(name, [2], vec![5.0, 7.0]));
    let (other, alike) = (builder.build(DType::F64).unwrap(), student.duplicate().unwrap());
    for (teacher, id, values) in [(&other, first, [5.0, 7.0]), (&other, last, [5.0, 7.0]), (&alike, p, [2.0, 3.0])] {
        for (samples, teacher_first) in [(1, false), (1, true), (8, false), (8, true)] {
            let tape = Tape::new();
            let product = tape.in_pieces(&tape.constant(Tensor::full([samples, 2], 10.0)), 1, |x, _| {
                let of_teacher = || Ok::<_, Error>(times(x, &x.tape().parameter(teacher, id))?.detach());
                let early = teacher_first.then(of_teacher).transpose()?;
                let of_student = times(x, &x.tape().parameter(&student, p))?;
                Ok::<_, Error>((times(&early.map_or_else(of_teacher, Ok)?, &of_student)?, ()))
            });
            let product = product.unwrap().0;
            // Of a single sample also where a parameter of the student's has been met before.
            let met = samples == 1;
            let y = if met { times(&product, &tape.parameter(&student, p)).unwrap() } else { product };
            let mut gradients = Gradients::new(&student).unwrap();
            tape.backward_from(&y, Tensor::full([samples, 2], 1.0), &mut gradients).unwrap();
            let by_parameter = |i: usize| if met { 2.0 * [2.0, 3.0][i] } else { samples as f64 };
            let expected = [0, 1].map(|i| 100.0 * values[i] * by_parameter(i));
            assert_eq!(of(&gradients, p), expected, "{samples} {teacher_first}");
        }
    }
}

/// A teacher and its student are laid out alike: without an error, one's gradients would be added to the other's.
#[test]
fn parameters_of_two_models_do_not_meet_on_a_tape() {
    let (student, p, _) = parameters();
    for teacher in [parameters().0, student.duplicate().unwrap()] {
        let backward = |first: &Parameters, second: &Parameters, in_pieces: bool| {
            let tape = Tape::new();
            let x = tape.constant(Tensor::full([2, 2], 1.0));
            let y = match in_pieces {
                true => {
                    let model = |samples: std::ops::Range<usize>| if samples.start == 0 { first } else { second };
                    let product =
                        tape.in_pieces(&x, 1, |x, samples| Ok((times(x, &x.tape().parameter(model(samples), p))?, ())));
                    product.map(|(y, _): (_, Vec<()>)| y)
                }
                false => {
                    let x = tape.constant(vector(&[1.0, 1.0]));
                    times(&times(&x, &tape.parameter(first, p))?, &tape.parameter(second, p))
                }
            }?;
            tape.backward_from(&y, Tensor::full(y.shape().clone(), 1.0), &mut Gradients::new(&student)?)
        };
        for in_pieces in [false, true] {
            assert_eq!(backward(&student, &teacher, in_pieces), Err(Error::TwoModels));
            assert_eq!(backward(&teacher, &student, in_pieces), Err(Error::TwoModels));
            // The same model twice, also rounded or shared, is one.
            backward(&student, &student.share(), in_pieces).unwrap();
            backward(&student, &student.cast(DType::F64).unwrap(), in_pieces).unwrap();
        }
    }
}
